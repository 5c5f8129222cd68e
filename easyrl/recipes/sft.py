"""SFT: supervised fine-tuning on given completions (Ouyang et al. 2022, arXiv 2203.02155)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from easyrl.recipes.aggregated import Aggregated
from easyrl.recipes.recipe import AdvantageInputs, Advantages, RunSettings, Terms
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class SFT(Aggregated):
    r"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \log \pi(o_{i,t} \mid q_i, o_{i,<t})

    The mean is over all trained tokens of an optimizer step, of all micro-batches and ranks.
    """

    # sequence: a mean over each completion's tokens, then over completions
    aggregation: Literal["token", "sequence"] = "token"

    source: ClassVar[Literal["rollouts", "records"]] = "records"

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        return [np.ones(len(group.completions)) for group in groups]

    def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
        return -terms.loss_weights * logprobs
