"""Dr. GRPO: GRPO without its biases (Liu et al. 2025, arXiv 2503.20783, §3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeFloat

from easyrl.recipes.estimators import Aggregation
from easyrl.recipes.grpo import GRPO, GroupAdvantage


@dataclass(frozen=True)
class DrGRPO(GRPO):
    r"""GRPO Done Right: neither a response's length nor its group's deviation is divided by.

    .. math::
        L = -\frac{1}{G} \sum_i \frac{1}{T_{max}} \sum_t \min(\rho_{i,t} A_i,
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon) A_i), \quad
        A_i = r_i - \mathrm{mean}(r)

    with ``T_max = rollout.max_tokens``. The paper trains without KL, with a clip of 0.2 (its
    appendix G, table 6).
    """

    advantage: GroupAdvantage = "group_mean"
    aggregation: Aggregation = "constant"
    kl_coef: NonNegativeFloat = 0.0
