"""Log-probabilities without logits: peak memory and time against whole logits.

``python -m benchmarks.logprob_memory [--tokens 1024 2048] [--chunk 512] [--entropy-gradient]
[--device cuda --dtype bfloat16 [--no-triton]]``

One forward and backward from hidden states [T, 1024] through a projection to a vocabulary of
151,936: log-probabilities and entropies of T labels as values, and the gradients of a weighted sum
of the log-probabilities (with ``--entropy-gradient`` of the entropies too) in hidden states and
weight. ``recompute`` is ``linear_logprobs``, ``same_pass`` the same with a loss. The other side
has whole logits in plain autograd, with as few of them alive as that allows: ``log_softmax``, which
saves its result alone, ``gather``, and the entropy as a dot product of it with its exponential.

Memory is what a side needs at its peak beyond what every side has to hold, namely the inputs and
their gradients: on a CPU the process's highest resident set during the run, on a GPU the
allocator's peak, less the bytes of inputs and gradients; the figure with them stands beside it.

The sides take turns in one process per T, pinned to as many cores as threads, until ``--repeats``
turns are made or ``--budget-s`` would be exceeded (at least two). A row's ratios are medians of the
ratios within a turn; ``cpu_time_ratio`` is of the processors' seconds, which other work on the
machine disturbs less. ``memory_ratio`` and ``time_ratio`` are those of ``same_pass``, which
training uses where the loss is per token. The last line printed is one JSON object, a row per T.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from easyrl.kernels.logprobs import row_functions
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.runtime.machine import pin_process, usable_cpus

METHODS = ("recompute", "same_pass")
WHOLE = "whole"
# With whole logits, T of 8,192 takes a CPU minutes a turn.
TOKENS = {"cpu": (1024, 2048), "cuda": (2048, 8192, 32_768)}


@dataclass(frozen=True)
class Work:
    tokens: int
    vocab: int
    hidden: int
    chunk: int
    entropy_gradient: bool
    device: str
    dtype: torch.dtype
    threads: int
    triton: bool  # on a GPU

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of hidden states and weight."""
        return (self.tokens + self.vocab) * self.hidden * self.dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [T, H], requires a gradient
    weight: Tensor  # [V, H], requires a gradient
    labels: Tensor  # int64 [T]
    coefficients: Tensor  # float32 [2, T], of log-probabilities and entropies in the loss

    @classmethod
    def random(cls, work: Work) -> Inputs:
        generator = torch.Generator(work.device).manual_seed(0)
        kind = {"generator": generator, "device": work.device}
        hidden = torch.randn(work.tokens, work.hidden, dtype=work.dtype, **kind)
        weight = torch.empty(work.vocab, work.hidden, dtype=work.dtype, device=work.device)
        weight.normal_(std=0.05, generator=generator)
        labels = torch.randint(work.vocab, (work.tokens,), **kind)
        coefficients = torch.randn(2, work.tokens, **kind)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), labels, coefficients)


@dataclass(frozen=True)
class Turn:
    """What one side needed for one forward and backward."""

    wall_s: float
    processors_s: float
    peak_bytes: int  # beyond the inputs and their gradients


def main() -> None:
    arguments = _parse()
    token_counts = arguments.tokens or TOKENS[arguments.device]
    rows = []
    for tokens in token_counts:
        work = Work(
            tokens=tokens,
            vocab=arguments.vocab,
            hidden=arguments.hidden,
            chunk=arguments.chunk,
            entropy_gradient=arguments.entropy_gradient,
            device=arguments.device,
            dtype=getattr(torch, arguments.dtype),
            threads=arguments.threads,
            triton=not arguments.no_triton,
        )
        print(work, flush=True)
        budget_s = arguments.budget_s * tokens / sum(token_counts)
        with get_context("spawn").Pool(1) as pool:  # whose memory nobody has used before
            turns = pool.apply(_take_turns, (work, arguments.repeats, budget_s))
        rows.append(_row(work, turns))
        print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(json.dumps({"rows": rows}))


def _row(work: Work, turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Prints each side's medians and returns the ratios to whole logits."""
    held = 2 * work.gradient_bytes + 16 * work.tokens  # labels, coefficients
    for side in (WHOLE, *METHODS):
        peak = statistics.median(turn.peak_bytes for turn in turns[side])
        wall_s = statistics.median(turn.wall_s for turn in turns[side])
        processors_s = statistics.median(turn.processors_s for turn in turns[side])
        print(
            f"  {side:10} {peak / 2**20:7.0f} MiB, with inputs and gradients "
            f"{(peak + held) / 2**20:7.0f} MiB {wall_s:7.2f} s, of processors {processors_s:.2f} s"
        )
    row: dict[str, float] = {"tokens": work.tokens, "repeats": len(turns[WHOLE])}
    for method in reversed(METHODS):
        prefix = "" if method == "same_pass" else f"{method}_"
        pairs = list(zip(turns[method], turns[WHOLE], strict=True))
        ratios = {
            "memory_ratio": (a.peak_bytes / b.peak_bytes for a, b in pairs),
            "memory_ratio_with_inputs": (
                (a.peak_bytes + held) / (b.peak_bytes + held) for a, b in pairs
            ),
            "time_ratio": (a.wall_s / b.wall_s for a, b in pairs),
            "cpu_time_ratio": (a.processors_s / b.processors_s for a, b in pairs),
        }
        row |= {prefix + key: round(statistics.median(r), 4) for key, r in ratios.items()}
    return row


def run(side: str, inputs: Inputs, work: Work) -> tuple[Tensor, Tensor]:
    """One forward and backward; log-probabilities and entropies [T], gradients in ``inputs``."""
    inputs.hidden.grad = inputs.weight.grad = None
    by_logprob, by_entropy = inputs.coefficients

    def token_loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        losses = by_logprob[rows] * logprobs
        return losses + by_entropy[rows] * entropy if work.entropy_gradient else losses

    if side == "same_pass":
        loss, logprobs, entropy = linear_logprobs(
            inputs.hidden, inputs.weight, inputs.labels, token_loss, chunk_size=work.chunk
        )
    else:
        if side == "recompute":
            logprobs, entropy = linear_logprobs(
                inputs.hidden, inputs.weight, inputs.labels, chunk_size=work.chunk
            )
        else:
            logprobs, entropy = _whole(inputs, work.entropy_gradient)
        loss = token_loss(logprobs, entropy, slice(None)).sum()
    loss.backward()
    return logprobs.detach(), entropy.detach()


def _whole(inputs: Inputs, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(inputs.hidden, inputs.weight)
    logp = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    del logits
    logprobs = logp.gather(1, inputs.labels[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient):
        entropy = -torch.linalg.vecdot(logp.exp(), logp)
    return logprobs, entropy


def _take_turns(work: Work, repeats: int, budget_s: float) -> dict[str, list[Turn]]:
    """Turns of each side, one after the other, beginning with another side each time."""
    torch.set_num_threads(work.threads)
    pin_process(0, usable_cpus()[: work.threads])
    row_functions.USE_TRITON = work.triton
    sides = (WHOLE, *METHODS)
    small = Work(**{**vars(work), "tokens": 8, "vocab": 1000, "chunk": 4})
    for side in sides:
        run(side, Inputs.random(small), small)  # libraries and their threads
    inputs = Inputs.random(work)
    if work.device != "cpu":
        for side in sides:  # kernels are chosen and compiled for the sizes
            run(side, inputs, work)
    turns: dict[str, list[Turn]] = {side: [] for side in sides}
    started = time.perf_counter()
    for repeat in range(repeats):
        for place in range(len(sides)):
            side = sides[(place + repeat) % len(sides)]
            turns[side].append(_turn(side, inputs, work))
        elapsed = time.perf_counter() - started
        if repeat > 0 and elapsed * (repeat + 2) / (repeat + 1) > budget_s:
            break
    return turns


def _turn(side: str, inputs: Inputs, work: Work) -> Turn:
    inputs.hidden.grad = inputs.weight.grad = None
    gc.collect()
    if work.device == "cpu":
        before = _resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    else:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    wall, processors = time.perf_counter(), time.process_time()
    run(side, inputs, work)
    if work.device != "cpu":
        torch.cuda.synchronize()
    wall_s, processors_s = time.perf_counter() - wall, time.process_time() - processors
    peak = _resident_bytes("VmHWM") if work.device == "cpu" else torch.cuda.max_memory_allocated()
    return Turn(wall_s, processors_s, peak - before - work.gradient_bytes)


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help=f"T, by device: {TOKENS}")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=240.0, help="of all turns together")
    parser.add_argument("--entropy-gradient", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--threads", type=int, default=len(usable_cpus()))
    return parser.parse_args()


if __name__ == "__main__":
    main()
