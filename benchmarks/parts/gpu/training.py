"""Rows ``training``, ``engine`` and ``head`` of ``benchmarks.gpu``.

``training`` needs torch and transformers alone: bf16 weights, gradients added up in fp32, AdamW
over fp32 master weights, which is what the engine holds on one rank. ``engine`` is
``DeepSpeedEngine`` with its defaults.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parts.gpu.model import (
    Clock,
    flops,
    num_parameters,
    peak_flops,
    random_policy,
    random_row,
)
from benchmarks.parts.gpu.rows import GroupShape, ModelShape, Row
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs

REPEATS = 3
CHUNKS = (512, 1024, 2048, 4096, 8192)
# Of a parameter (docs/memory.md): bf16 weight, fp32 gradient; master weight and two moments.
WEIGHT_AND_GRADIENT, OPTIMIZER = 2 + 4, 4 + 8

Numbers = dict[str, Any]


def measure_training(
    row: Row, shape: ModelShape, group: GroupShape, device: torch.device
) -> Numbers:
    policy = random_policy(shape, row, device)
    optimizer = _MasterAdamW(policy, device, steps=row.optimizer)
    packed = random_row(group, shape.vocab, device)
    weights = torch.randn(len(packed.label_ids), device=device)

    def token_loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return -weights[rows] * (logprobs - logprobs.detach()).exp()  # GRPO's first update

    def forward_backward() -> None:
        loss_sum, _, _ = policy(*packed, 1.0, token_loss)
        loss_sum.backward()

    step = optimizer.step if row.optimizer else None
    documented = WEIGHT_AND_GRADIENT + OPTIMIZER * row.optimizer
    return _steps(forward_backward, step, documented, shape, group, device)


def measure_engine(row: Row, shape: ModelShape, group: GroupShape, device: torch.device) -> Numbers:
    """Raises ``ImportError`` where DeepSpeed or what easyrl needs is missing."""
    from benchmarks.parts.shared_prompt.sizes import Shape, random_batch
    from easyrl.config.file import validate_config
    from easyrl.engines.deepspeed.engine import DeepSpeedEngine
    from easyrl.engines.deepspeed.memory import bytes_per_parameter

    config = validate_config(
        {
            "model": {"path": "random", "dtype": "bf16"},
            "data": {"files": ["none.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"kl_coef": 0.0},
        }
    )
    engine = DeepSpeedEngine(config, load_model=lambda: random_policy(shape, row, device))
    batch = random_batch(Shape(group.prompt, group.responses, group.length), shape.vocab)

    def forward_backward() -> None:
        engine.forward_backward([batch.micro_batch])

    def step() -> None:
        engine.optimizer_step(batch.denominator)

    use = bytes_per_parameter(config.trainer.zero_stage, "bf16", 1)
    return _steps(forward_backward, step, use.device, shape, group, device)


def measure_head(row: Row, shape: ModelShape, group: GroupShape, device: torch.device) -> Numbers:
    """Milliseconds of the projection to the vocabulary and its gradients, by chunk size."""
    num_tokens = group.responses * group.length
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(num_tokens, shape.hidden, **like).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden, **like) * 0.02).requires_grad_()
    labels = torch.randint(shape.vocab, (num_tokens,), device=device)
    clock, found = Clock(device), {}
    for chunk in CHUNKS:

        def run(chunk: int = chunk) -> None:
            loss_sum, _, _ = linear_logprobs(
                hidden, weight, labels, lambda logp, h, rows: -logp, chunk_size=chunk
            )
            torch.autograd.grad(loss_sum, (hidden, weight))

        run()
        found[str(chunk)] = 1000 * statistics.median(clock.seconds(run) for _ in range(REPEATS))
    return {"head_ms": found}


def _steps(
    forward_backward: Callable[[], None],
    step: Callable[[], object] | None,
    documented: float,
    shape: ModelShape,
    group: GroupShape,
    device: torch.device,
) -> Numbers:
    clock = Clock(device)
    forward_backward()  # compiles, checks backends, makes buffers
    if step is not None:
        step()
    clock.forget_peak()
    seconds = statistics.median(clock.seconds(forward_backward) for _ in range(REPEATS))
    step_s = None if step is None else clock.seconds(step)
    layout = random_row(group, 2, torch.device("cpu")).layout
    achieved = flops(shape, group, layout) / seconds
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name)
    return {
        "parameters": num_parameters(shape),
        "forward_backward_s": seconds,
        "step_s": step_s,
        "row_tokens_per_s": group.row_tokens / seconds,
        "sequence_tokens_per_s": group.sequence_tokens / seconds,
        "tflops": achieved / 1e12,
        "mfu": None if peak is None else achieved / peak,
        "peak_bytes": clock.peak_bytes(),
        "documented_bytes": documented * num_parameters(shape),
    }


class _MasterAdamW:
    """AdamW on fp32 master weights of bf16 parameters, whose gradients are added up in fp32 and
    freed as they come."""

    def __init__(self, model: nn.Module, device: torch.device, *, steps: bool) -> None:
        self._parameters = list(model.parameters())
        self._sums = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.register_post_accumulate_grad_hook(_adder(total))
        if steps:
            self._masters = [p.detach().float().clone() for p in self._parameters]
            fused = True if device.type == "cuda" else None
            self._adamw = torch.optim.AdamW(self._masters, lr=1e-6, fused=fused)

    @torch.no_grad()
    def step(self) -> None:
        for master, total in zip(self._masters, self._sums, strict=True):
            master.grad = total
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adamw.step()
        for parameter, master, total in zip(
            self._parameters, self._masters, self._sums, strict=True
        ):
            parameter.copy_(master)
            total.zero_()


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        total.add_(parameter.grad)
        parameter.grad = None

    return add
