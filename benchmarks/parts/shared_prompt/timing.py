"""Do the sides of ``benchmarks.shared_prompt`` compute the same, and how long does each take?"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from benchmarks.parts.shared_prompt.workload import Forward

OutOfMemory = torch.OutOfMemoryError
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Disagreement(RuntimeError):
    """A side computes something else than the others."""


def compare(
    sides: Mapping[str, Forward], module: nn.Module, reference: str
) -> dict[str, tuple[float, float]]:
    """Relative errors of each side's loss and gradient against those of ``reference``.

    The gradient's is the norm of the difference over the norm, over all parameters. A side that
    runs out of memory is left out; if ``reference`` does, so is everything. This is the sides'
    warm-up too.
    """
    errors: dict[str, tuple[float, float]] = {}
    expected: tuple[float, list[Tensor]] | None = None
    for name in [reference, *(name for name in sides if name != reference)]:
        try:
            loss = run(sides[name], module)
        except OutOfMemory:
            module.zero_grad(set_to_none=True)
            continue
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        if expected is None:
            expected = loss, [gradient.clone() for gradient in gradients]
        errors[name] = abs(loss - expected[0]) / abs(expected[0]), _distance(gradients, expected[1])
        module.zero_grad(set_to_none=True)
    return errors


def check(errors: Mapping[str, tuple[float, float]], dtype: torch.dtype) -> None:
    """Raises ``Disagreement`` naming the sides whose loss or gradient is off."""
    tolerance = TOLERANCES[dtype]
    wrong = {name: error for name, error in errors.items() if not max(error) <= tolerance}
    if wrong:
        raise Disagreement(f"relative errors of loss and gradient above {tolerance}: {wrong}")


def _distance(gradients: list[Tensor], expected: list[Tensor]) -> float:
    if len(gradients) != len(expected):
        return math.inf
    squared, norm = 0.0, 0.0
    for gradient, target in zip(gradients, expected, strict=True):
        squared += float((gradient - target).double().square().sum())
        norm += float(target.double().square().sum())
    return math.sqrt(squared / norm)


def run(forward: Forward, module: nn.Module) -> float:
    """Forward and backward; the gradients stay in ``module``. Returns the loss."""
    module.zero_grad(set_to_none=True)
    loss = forward()
    loss.backward()
    return float(loss.detach())


# processor: of this process, all threads; on a machine that others use it is the steadier one
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def seconds_in_turns(
    sides: Mapping[str, Forward],
    module: nn.Module,
    device: torch.device,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Of each side's forward and backward, once per repeat; who begins changes."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with frozen_garbage():
        for repeat in range(repeats):
            shift = repeat % len(names)
            for name in names[shift:] + names[:shift]:
                module.zero_grad(set_to_none=True)
                gc.collect()
                synchronize(device)
                start = clock()
                sides[name]().backward()
                synchronize(device)
                seconds[name].append(clock() - start)
    module.zero_grad(set_to_none=True)
    return seconds


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """No collection but those asked for, and these do not look at what is there already."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def matrix_product_flops(
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 10,
) -> float:
    """Operations per second of a large square matrix product, the best of ``repeats``."""
    size = 8192 if device.type == "cuda" else 2048
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(repeats):
        synchronize(device)
        start = clock()
        left @ right
        synchronize(device)
        best = min(best, clock() - start)
    return 2 * size**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
