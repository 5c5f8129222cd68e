"""Log-probabilities without logits: peak memory and time against whole logits.

``python -m benchmarks.logprob_memory [--tokens 2048 8192] [--chunk 512] [--entropy-gradient]
[--device cuda --dtype bfloat16 [--no-triton]]``

One forward and backward from hidden states [T, 1024] through a projection to a vocabulary of
151,936: log-probabilities and entropies of T labels as values, and the gradients of a weighted sum
of the log-probabilities (with ``--entropy-gradient`` of the entropies too) in hidden states and
weight. ``recompute`` is ``linear_logprobs``, ``same_pass`` the same with a loss. The other side
has whole logits in plain autograd, with as few of them alive as that allows: ``log_softmax``, which
saves its result alone, ``gather``, and the entropy as a dot product of it with its exponential.

Memory is what a side needs at its peak beyond what every side has to hold, namely the inputs and
their gradients: on a CPU the highest resident set of a fresh process, on a GPU the allocator's
peak, less the bytes of inputs and gradients; the figure with them stands beside it. Times: the
sides take turns in one process pinned to as many cores as threads, after a warm-up each; a ratio is
the median of the ratios within a turn. ``cpu_time_ratio`` is of the processors' seconds, which
other work on the machine disturbs less. ``--repeats 0`` measures memory only. The last line printed
is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from easyrl.kernels.logprobs import row_functions
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.runtime.machine import pin_process, usable_cpus

METHODS = ("recompute", "same_pass")
WHOLE = "whole"
Result = TypeVar("Result")


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


def main() -> None:
    arguments = _parse()
    rows = []
    for tokens in arguments.tokens:
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
        memory = {side: _in_fresh_process(_peak_memory, work, side) for side in (WHOLE, *METHODS)}
        seconds = _in_fresh_process(_times, work, arguments.repeats) if arguments.repeats else {}
        held = 2 * work.gradient_bytes + 16 * tokens  # labels, coefficients
        for side in (WHOLE, *METHODS):
            print(
                f"  {side:10} {memory[side] / 2**20:7.0f} MiB, with inputs and gradients "
                f"{(memory[side] + held) / 2**20:7.0f} MiB"
            )
            if seconds:
                wall, processors = (statistics.median(s) for s in zip(*seconds[side], strict=True))
                print(f"  {'':10} {wall:7.2f} s, of processors {processors:.2f} s")
        for method in METHODS:
            row: dict[str, object] = {"tokens": tokens, "method": method}
            row["memory_ratio"] = round(memory[method] / memory[WHOLE], 4)
            with_inputs = (memory[method] + held) / (memory[WHOLE] + held)
            row["memory_ratio_with_inputs"] = round(with_inputs, 4)
            if seconds:
                pairs = list(zip(seconds[method], seconds[WHOLE], strict=True))
                row["time_ratio"] = round(statistics.median(a[0] / b[0] for a, b in pairs), 3)
                row["cpu_time_ratio"] = round(statistics.median(a[1] / b[1] for a, b in pairs), 3)
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
    print(json.dumps({"rows": rows}))


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


def _peak_memory(work: Work, side: str) -> int:
    """Bytes beyond the inputs and their gradients."""
    _prepare(work)
    small = Work(**{**vars(work), "tokens": 8, "vocab": 1000, "chunk": 4})
    run(side, Inputs.random(small), small)  # libraries and their threads
    inputs = Inputs.random(work)
    gc.collect()
    if work.device == "cpu":
        before = _resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        run(side, inputs, work)
        peak = _resident_bytes("VmHWM")
    else:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(side, inputs, work)
        peak = torch.cuda.max_memory_allocated()
    return peak - before - work.gradient_bytes


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _times(work: Work, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Wall seconds and processor seconds of each turn."""
    _prepare(work)
    inputs = Inputs.random(work)
    sides = (WHOLE, *METHODS)
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side in sides:
            _synchronize(work)
            wall, processors = time.perf_counter(), time.process_time()
            run(side, inputs, work)
            _synchronize(work)
            if repeat > 0:
                elapsed = (time.perf_counter() - wall, time.process_time() - processors)
                seconds[side].append(elapsed)
    return seconds


def _prepare(work: Work) -> None:
    torch.set_num_threads(work.threads)
    pin_process(0, usable_cpus()[: work.threads])
    row_functions.USE_TRITON = work.triton


def _synchronize(work: Work) -> None:
    if work.device != "cpu":
        torch.cuda.synchronize()


def _in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--entropy-gradient", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--threads", type=int, default=len(usable_cpus()))
    return parser.parse_args()


if __name__ == "__main__":
    main()
