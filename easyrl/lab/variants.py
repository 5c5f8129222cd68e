"""One recorded batch, trained with several settings: how gradient and update differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Tensors = Mapping[str, Tensor]  # float32, on the host, by the weight's name

# Metrics of the step that are shown of each variant, where it has them.
SHOWN = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "policy/clip_low": "clipped low",
    "policy/clip_high": "clipped high",
    "policy/clipped": "clipped",
    "policy/clip_delta": "clipped by delta",
    "policy/clip_dual": "clipped twice",
    "critic/clip_fraction": "values clipped",
    "policy/kl": "KL",
    "policy/entropy": "entropy",
    "tokens/packed": "packed tokens",
}


@dataclass(frozen=True)
class Measured:
    """What a batch came to with one variant's settings, from the weights that the run had."""

    settings: Sequence[str]  # key.path=value, in place of the run's; empty: the run's own
    metrics: Mapping[str, float]
    gradients: Sequence[Tensors]  # of each of the batch's updates, before clip and optimizer
    update: Tensors  # weights behind the batch minus those before it


@dataclass(frozen=True)
class Comparison:
    """A variant beside the run's own settings; cosines are NaN where a vector is zero."""

    settings: Sequence[str]
    metrics: Mapping[str, float]
    gradient_norm: float  # before the clip, of the batch's first update
    gradient_cosine: float
    later_cosines: Sequence[float]  # of the gradients of its further updates, as many as both have
    update_norm: float
    update_cosine: float


def compare(own: Measured, variant: Measured) -> Comparison:
    """``variant`` beside ``own``; a weight that one of them does not train counts as zero there."""
    first = variant.gradients[0]
    cosines = [cosine(a, b) for a, b in zip(own.gradients, variant.gradients, strict=False)]
    return Comparison(
        settings=variant.settings,
        metrics={name: variant.metrics[name] for name in SHOWN if name in variant.metrics},
        gradient_norm=math.sqrt(_dot(first, first)),
        gradient_cosine=cosines[0],
        later_cosines=cosines[1:],
        update_norm=math.sqrt(_dot(variant.update, variant.update)),
        update_cosine=cosine(own.update, variant.update),
    )


def cosine(one: Tensors, other: Tensors) -> float:
    """Of the angle between all tensors of each, taken as one vector."""
    norms = _dot(one, one) * _dot(other, other)
    return _dot(one, other) / math.sqrt(norms) if norms > 0 else math.nan


def _dot(one: Tensors, other: Tensors) -> float:
    """In double precision: a cosine near 1 is the point."""
    pairs = ((one[name].double(), other[name].double()) for name in one if name in other)
    return sum(float((a * b).sum()) for a, b in pairs)
