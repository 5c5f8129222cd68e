"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, §4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat

from easyrl.recipes.estimators import Aggregation, each_reward_advantages, group_advantages
from easyrl.recipes.recipe import AdvantageInputs, Advantages, RunSettings
from easyrl.recipes.surrogate import ClippedSurrogate
from easyrl.schema import RolloutGroup

# divide by the group's deviation, only centre, or divide each reward by its own deviation
GroupAdvantage = Literal["group_std", "group_mean", "each_reward_std"]


@dataclass(frozen=True)
class GRPO(ClippedSurrogate):
    r"""Group Relative Policy Optimization (DeepSeekMath, eq. 3 and 4).

    .. math::
        L = -\frac{1}{G} \sum_i \frac{1}{|o_i|} \sum_t \big[ \min(\rho_{i,t} A_i,
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_i)
            - \beta\, \mathrm{KL}_{k3} \big], \quad
        \rho = \pi / \pi_{old}, \quad A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}

    The fields' defaults are the paper's (beta 0.04; it does not print the clip, 0.2 is PPO's).

    With ``advantage: each_reward_std`` each of the run's rewards is normalised by itself, and their
    sum weighed by ``rewards[n].weight`` is the advantage: GDPO (arXiv 2601.05242) without its
    second normalisation over the batch.
    """

    advantage: GroupAdvantage = "group_std"
    aggregation: Aggregation = "sequence"
    kl_coef: NonNegativeFloat = 0.04

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        if self.advantage == "each_reward_std":
            return [each_reward_advantages(self.weighted_rewards(g, run)) for g in groups]
        return [group_advantages(self.rewards(group, run), self.advantage) for group in groups]
