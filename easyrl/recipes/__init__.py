"""RL algorithms: one class in one file each, and the pure functions that they are made of.

Consumes: finished groups (advantages, weights), what the policy says of their tokens (loss). Waits
for: nothing. Unblocked by: nothing. Produces: advantages per response, loss terms per token.
"""

from easyrl.recipes.dapo import DAPO
from easyrl.recipes.dpo import DPO
from easyrl.recipes.dr_grpo import DrGRPO
from easyrl.recipes.estimators import (
    aggregation_weights,
    clipped_surrogate,
    group_advantages,
    importance_ratio,
    importance_weights,
    kl_estimate,
    reward_to_go,
)
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.recipe import AdvantageInputs, Models, Recipe, RunSettings, Terms
from easyrl.recipes.sft import SFT

__all__ = [
    "DAPO",
    "DPO",
    "GRPO",
    "SFT",
    "AdvantageInputs",
    "DrGRPO",
    "Models",
    "Recipe",
    "RunSettings",
    "Terms",
    "aggregation_weights",
    "clipped_surrogate",
    "group_advantages",
    "importance_ratio",
    "importance_weights",
    "kl_estimate",
    "reward_to_go",
]
