"""Adaptive entropy control: a bonus whose coefficient follows the measured entropy.

Skywork Open Reasoner 1 (arXiv 2505.22312): the coefficient c rises by a fixed step where the
entropy is at or below its target and falls by it elsewhere; the bonus c H is in the loss only while
the entropy is at or below the target. There the entropy of a step is measured before its gradient.
Here training begins before all of a batch's responses are there, so the entropy of one optimizer
step acts on the next one, as in TRL 1.16, whose bounds of c and defaults these are (its
documentation names the paper as the source; the paper's own section was not at hand).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

COEF, ENTROPY = "entropy_coef", "entropy"  # of the controls: c, and the entropy last measured


def next_entropy_controls(
    controls: Mapping[str, float], entropy: float, *, target: float, step: float, maximum: float
) -> dict[str, float]:
    """The controls behind an optimizer step, from those that it was taken with.

    ``entropy``: mean over the step's trained tokens, nats; where it is not finite nothing changes.
    ``maximum``: of the coefficient, which is not below 0 either.
    """
    if not math.isfinite(entropy):
        return dict(controls)
    moved = controls[COEF] + (step if entropy <= target else -step)
    return {COEF: min(max(moved, 0.0), maximum), ENTROPY: entropy}


def applied_coefficient(controls: Mapping[str, float], target: float) -> float:
    """Of the next step's bonus; 0 above the target, and before the first measurement."""
    return controls[COEF] if controls.get(ENTROPY, math.inf) <= target else 0.0
