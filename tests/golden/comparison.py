"""What a run comes to, held against what was kept: bits where it computes alike, else nearly.

Another processor sums in another order. How far that leads was measured on one machine from its
largest instruction set to the smallest (``ATEN_CPU_CAPABILITY``, ``MKL_ENABLE_INSTRUCTIONS``,
``ONEDNN_MAX_CPU_ISA``), and each tolerance is some times that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

Steps = Sequence[Mapping[str, float]]
Sketch = Mapping[str, Sequence[float]]

# Of a figure, in float32: relative above 1, below it absolute, for a loss is a sum of terms of
# order 1 that cancel, and a log-probability's difference is rounding alone. Measured: 3e-7.
FIGURES_TOLERANCE = 1e-6
NUM_PROJECTIONS = 4


def sketch(weights: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """Of each tensor its norm and its projections, in float64, by name.

    A projection is a sum with fixed signs. A change of distance d moves each by about d, so that it
    is seen whatever it is; norms alone miss what is orthogonal to the weights.
    """
    figures = {}
    for name, tensor in sorted(weights):
        values = tensor.detach().double().numpy().ravel()
        sums = [float(signs(seed, values.size) @ values) for seed in range(NUM_PROJECTIONS)]
        figures[name] = [float(np.linalg.norm(values)), *sums]
    return figures


def signs(seed: int, count: int) -> np.ndarray:
    """float64 [count] of 1 and -1, the same with every numpy."""
    raw = np.random.PCG64(seed).random_raw(math.ceil(count / 64)).astype("<u8")
    return 2.0 * np.unpackbits(raw.view(np.uint8))[:count] - 1


def assert_as_kept(
    now: Mapping[str, Any], kept: Mapping[str, Any], *, weights_tolerance: float
) -> None:
    """Fails where ``now`` is not the run that was kept.

    Args:
        now, kept: ``arithmetic`` (in words), ``steps`` (figures by step), ``weights`` (a digest)
            and ``sketch``.
        weights_tolerance: of what is in the sketch, as a part of the tensor's norm.
    """
    if now["arithmetic"] == kept["arithmetic"]:
        different = far_figures(now["steps"], kept["steps"], tolerance=0.0)
        assert not different, f"figures that are not those that were kept, to the bit: {different}"
        assert now["weights"] == kept["weights"], "the weights are others, the figures are not"
        return
    far = far_figures(now["steps"], kept["steps"], tolerance=FIGURES_TOLERANCE)
    assert not far, f"figures that differ by more than {FIGURES_TOLERANCE}: {far}"
    far = far_weights(now["sketch"], kept["sketch"], tolerance=weights_tolerance)
    assert not far, f"weights that differ by more than {weights_tolerance} of their norm: {far}"


def far_figures(now: Steps, kept: Steps, *, tolerance: float) -> list[str]:
    """What differs by more than ``tolerance`` times its size, or 1 where it is smaller."""
    if len(now) != len(kept):
        return [f"{len(now)} steps, kept are {len(kept)}"]
    far = []
    for index, (ours, theirs) in enumerate(zip(now, kept, strict=True)):
        for name in sorted({*ours, *theirs}):
            a, b = ours.get(name, math.nan), theirs.get(name, math.nan)
            if not abs(a - b) <= tolerance * max(1.0, abs(b)):  # also where one is not a number
                far.append(f"steps[{index}] {name}: {a}, kept is {b}")
    return far


def far_weights(now: Sketch, kept: Sketch, *, tolerance: float) -> list[str]:
    """The tensors of whose sketch something differs by more than ``tolerance`` of its norm."""
    far = []
    for name in sorted({*now, *kept}):
        ours, theirs = np.array(now.get(name, math.nan)), np.array(kept.get(name, [math.nan]))
        distance = np.abs(ours - theirs).max() / theirs[0]
        if not distance <= tolerance:  # also where it is not a number
            far.append(f"{name} by {distance:.2g}")
    return far
