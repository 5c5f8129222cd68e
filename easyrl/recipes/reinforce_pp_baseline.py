"""REINFORCE++-baseline: group mean off, then normalised over the batch (arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator, NonNegativeFloat

from easyrl.recipes.estimators import group_advantages
from easyrl.recipes.recipe import RunSettings
from easyrl.recipes.reinforce_pp import ReinforcePP
from easyrl.recipes.surrogate import no_k1
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class ReinforcePPBaseline(ReinforcePP):
    r"""REINFORCE++ for several responses per prompt, with the group's mean as a baseline.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \big[ \min(\rho_{i,t} A_i,
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon) A_i)
            - \beta\, \mathrm{KL}_{k2} \big], \quad
        A_i = \frac{\tilde r_i - \mathrm{mean}(\tilde r)}{\mathrm{std}(\tilde r)}, \quad
        \tilde r_i = r_i - \mathrm{mean}_{group}(r)

    Mean and deviation are the batch's, as in REINFORCE++, whose ``kl_in_reward_coef`` acts here,
    too, on what is left of a reward. The paper's KL of this variant is a loss, by k2, whose
    gradient is that of the reverse KL; 1e-3 is the coefficient of OpenRLHF's example.
    """

    kl_coef: NonNegativeFloat = 1e-3
    kl_estimator: Annotated[Literal["k3", "k2"], BeforeValidator(no_k1)] = "k2"

    def baselined(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        return group_advantages(super().baselined(group, run), "group_mean")
