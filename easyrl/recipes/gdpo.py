"""GDPO: Group reward-Decoupled Normalization Policy Optimization (arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import NonNegativeFloat

from easyrl.recipes.estimators import Aggregation, each_reward_advantages
from easyrl.recipes.recipe import AdvantageInputs, Advantages, RunSettings, Scope
from easyrl.recipes.surrogate import ClippedSurrogate
from easyrl.schema import RolloutGroup

EPS = 1e-4  # beside a deviation, as in TRL


@dataclass(frozen=True)
class GDPO(ClippedSurrogate):
    r"""GRPO with each reward normalised by itself, so that one cannot hide another.

    .. math::
        A_i = \frac{S_i - \mathrm{mean}_{batch}(S)}{\mathrm{std}_{batch}(S)}, \quad
        S_i = \sum_n w_n \frac{r_{n,i} - \mathrm{mean}_{group}(r_n)}{\mathrm{std}_{group}(r_n)}

    in GRPO's loss, without KL. ``w`` are the configuration's ``rewards[n].weight``. The batch is
    that of the optimizer step, of all ranks: training begins when the last response is there. S
    itself, which streams, is ``advantage: each_reward_std`` of GRPO and its relatives.
    ``scoring.truncated_reward`` replaces the sum of a response's rewards, not each of them, so that
    it does not reach these advantages.
    """

    aggregation: Aggregation = "sequence"
    kl_coef: NonNegativeFloat = 0.0

    @property
    def scope(self) -> Scope:
        return "batch"

    def batch_rewards(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        """float64 [G], S. Raises ``ValueError`` for a reward without a weight."""
        return each_reward_advantages(self.weighted_rewards(group, run))

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        batch = np.concatenate(inputs.rewards).astype(np.float64)
        if np.ptp(batch) == 0:
            return [np.zeros(len(group.scores)) for group in groups]
        mean, deviation = batch.mean(), batch.std(ddof=1)
        return [(self.batch_rewards(g, run) - mean) / (deviation + EPS) for g in groups]
