"""Steps of plain optimizers on the dense fp64 mean loss, to compare ``trainer.optimizer`` with.

Independent of ours but for the advantages: Hugging Face models on one sequence at a time, torch's
clip, and torch's or bitsandbytes' optimizer on the model's own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from easyrl.engines.deepspeed.shards import Fragment
from tests.easyrl.engines.update_cases import dense_loss, slices
from tests.tiny_models import save_tiny_model

NUM_STEPS = 4
STAGES = {"adamw": (0, 1, 2, 3), "adam8bit": (0, 1, 2, 3), "muon": (0, 1, 2)}
# An eps of the gradients' size and more: AdamW's step is no sign of the gradient, which would be
# the same at any scale, and rounding is not magnified where the gradient is nearly zero.
LEARNING_RATE, MUON_LEARNING_RATE, EPS, WEIGHT_DECAY = 0.5, 0.02, 1.0, 0.05
MOMENTUM = 0.9
SETTINGS: dict[str, dict[str, Any]] = {
    name: {
        "optimizer": name,
        "learning_rate": LEARNING_RATE,
        "adam_eps": EPS,
        "weight_decay": WEIGHT_DECAY,
    }
    for name in STAGES
}
SETTINGS["muon"] |= {"muon_learning_rate": MUON_LEARNING_RATE, "muon_momentum": MOMENTUM}

Optimizers = Sequence[Any]  # with ``param_groups`` and ``step``
Layout = list[tuple[int, list[Fragment]]]  # elements of a flat tensor, what lies where in it


def installed() -> list[str]:
    """The optimizers that can run here."""
    return [n for n in STAGES if n != "adam8bit" or find_spec("bitsandbytes") is not None]


def prepare(folder: Path) -> None:
    """Three layers, so that two halves of their matrices are not whole matrices; a head that is
    not tied."""
    for seed, name in enumerate(("policy", "reference", "old")):
        save_tiny_model(folder / name, "qwen3", seed=seed, num_hidden_layers=3)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')


class Step(NamedTuple):
    """What an optimizer step of the dense reference came to."""

    moved: dict[str, Tensor]  # weights after it less those at the start, by name
    averages: dict[str, Tensor]  # running mean of the clipped gradients: first moment or momentum
    grad_norm: float  # before the clip


def dense_steps(
    folder: Path,
    max_grad_norm: float,
    make: Callable[[PreTrainedModel], Optimizers],
    num_steps: int = NUM_STEPS,
) -> list[Step]:
    """Each on its slice of a batch, on a linear schedule; ``max_grad_norm`` of 0 is no clip."""
    policy, old, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("policy", "policy", "reference")
    )
    start = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizers = make(policy)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    steps = []
    for i, part in enumerate(slices(num_steps)):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * (1 - i / (2 * num_steps))
        policy.zero_grad()
        loss, _ = dense_loss(part, policy, old, reference)
        loss.backward()
        bound = max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), bound))
        for optimizer in optimizers:
            optimizer.step()
        moved = {name: p.detach() - start[name] for name, p in policy.named_parameters()}
        steps.append(Step(moved, averages_of(policy, optimizers), norm))
    return steps


def plain_adamw(policy: PreTrainedModel) -> Optimizers:
    return [torch.optim.AdamW(adam_groups(policy.parameters()), lr=LEARNING_RATE, eps=EPS)]


def plain_muon(policy: PreTrainedModel) -> Optimizers:
    """torch's Muon on the layers' matrices, AdamW on the rest."""
    named = dict(policy.named_parameters())
    inner = {n: p for n, p in named.items() if ".layers." in n and p.ndim == 2}
    outer = [p for n, p in named.items() if n not in inner]
    muon = torch.optim.Muon(
        inner.values(),
        lr=MUON_LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, torch.optim.AdamW(adam_groups(outer), lr=LEARNING_RATE, eps=EPS)]


def exact_newton_schulz(
    gradient: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """torch's iteration (``torch.optim._muon``) in fp64 where torch rounds to bf16.

    With it on both sides what is compared is the arithmetic before and after it.
    """
    a, b, c = coefficients
    x = gradient.double()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(gradient.dtype)


def adam_groups(parameters: Any) -> list[dict[str, Any]]:
    """Norms and biases do not decay."""
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in listed if p.ndim == 1], "weight_decay": 0.0},
    ]


class FlatAdamW8bit:
    """bitsandbytes' AdamW8bit on flat tensors, into which the model's parameters are laid.

    Where its blocks begin and end decides how moments are rounded, so they are those of ZeRO.
    """

    def __init__(self, policy: PreTrainedModel, layout: Layout) -> None:
        from bitsandbytes.optim import AdamW8bit

        self.parameters = dict(policy.named_parameters())
        self.laid = []
        for numel, fragments in layout:
            flat = torch.zeros(numel, requires_grad=True)
            self.laid.append((flat, fragments))
            self.copy(fragments, flat.detach(), self.parameters)
        decay = [self.parameters[fragments[0].name].ndim > 1 for _, fragments in self.laid]
        flats = [flat for flat, _ in self.laid]
        self.optimizer = AdamW8bit(
            [
                {"params": [f for f, d in zip(flats, decay, strict=True) if d]},
                {"params": [f for f, d in zip(flats, decay, strict=True) if not d]}
                | {"weight_decay": 0.0},
            ],
            lr=LEARNING_RATE,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
        )
        self.param_groups = self.optimizer.param_groups

    @staticmethod
    def copy(fragments: list[Fragment], flat: Tensor, values: dict[str, Tensor]) -> None:
        for name, start, numel, offset, _ in fragments:
            flat[offset : offset + numel] = values[name].detach().view(-1)[start : start + numel]

    def step(self) -> None:
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for flat, fragments in self.laid:
            flat.grad = torch.zeros_like(flat)
            self.copy(fragments, flat.grad, gradients)
        self.optimizer.step()
        for flat, fragments in self.laid:
            for name, start, numel, offset, _ in fragments:
                whole = self.parameters[name].detach().view(-1)
                whole[start : start + numel] = flat.detach()[offset : offset + numel]


def averages_of(policy: PreTrainedModel, optimizers: Optimizers) -> dict[str, Tensor]:
    names = {p: name for name, p in policy.named_parameters()}
    return {
        names[p]: state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"].clone()
        for optimizer in optimizers
        if not isinstance(optimizer, FlatAdamW8bit)  # only in 8 bits
        for p, state in optimizer.state.items()
    }
