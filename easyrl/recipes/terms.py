"""The records that a recipe's methods are given and give back."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from easyrl.engines.base import MetricSums


@dataclass(frozen=True, slots=True)
class Models:
    """The models, beside the policy, whose log-probabilities a recipe's loss is given."""

    reference: bool = False  # the initial policy, frozen
    old_policy: bool = False  # the policy before the batch's first update; else one forward less


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the sampling of a run's responses fixed."""

    max_tokens: int  # of a response
    num_generations: int  # G, responses of a group
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What advantages may depend on beside their own groups."""

    # float32 [G] of each group: with scope "batch" of all groups of the optimizer step, of all
    # data-parallel ranks, in the order of the prompts; else of the one group at hand
    rewards: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What the losses of n trained tokens are made of, beside what the policy says of them.

    Floating tensors are of the log-probabilities' dtype, without gradient. The tokens of a sequence
    are adjacent and in order. ``terms[rows]`` are those of a slice of the tokens.
    """

    advantages: Tensor  # [n]
    loss_weights: Tensor  # [n], of ``Recipe.token_weights``
    inference_logprobs: Tensor  # [n], of the server that sampled them
    old_logprobs: Tensor  # [n]; the policy's own where that is the old policy
    reference_logprobs: Tensor | None  # [n]; None unless the recipe needs a reference
    sequence_index: Tensor  # int64 [n], which of the row's sequences, not decreasing
    group_index: Tensor  # int64 [n], which of the row's groups

    def __getitem__(self, rows: slice) -> Terms:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: v[rows] for n, v in values.items() if v is not None})


@dataclass(frozen=True, slots=True)
class MetricTensors:
    """Scalars of a micro-batch, left on the device until all of them are read at once.

    ``sums`` add up over micro-batches: ``NAME_sum`` is reported as ``policy/NAME``, divided by the
    number of trained tokens. ``maxima`` combine by maximum and are reported as ``policy/NAME``.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def __or__(self, other: MetricTensors) -> MetricTensors:
        return MetricTensors(self.sums | other.sums, self.maxima | other.maxima)

    def read(self) -> MetricSums:
        """The numbers, in one transfer from the device."""
        tensors = [*self.sums.values(), *self.maxima.values()]
        numbers = torch.stack([t.double() for t in tensors]).tolist() if tensors else []
        sums = dict(zip(self.sums, numbers, strict=False))
        return MetricSums(sums, dict(zip(self.maxima, numbers[len(sums) :], strict=True)))
