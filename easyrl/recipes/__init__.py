"""RL algorithms: one class in one file each, and the pure functions that they are made of.

Consumes: finished groups (advantages, weights), what the policy says of their tokens (loss). Waits
for: nothing. Unblocked by: nothing. Produces: advantages per response, loss terms per token.
"""

from easyrl.recipes.cispo import CISPO
from easyrl.recipes.dapo import DAPO
from easyrl.recipes.dpo import DPO
from easyrl.recipes.dr_grpo import DrGRPO
from easyrl.recipes.dual_clip import DualClip
from easyrl.recipes.estimators import (
    aggregation_weights,
    clipped_surrogate,
    group_advantages,
    importance_ratio,
    importance_weights,
    kl_estimate,
    leave_one_out_advantages,
    normalised,
    reward_to_go,
    sequence_ratio,
    sequence_sums,
)
from easyrl.recipes.gdpo import GDPO
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.gspo import GSPO
from easyrl.recipes.gspo_token import GSPOToken
from easyrl.recipes.recipe import AdvantageInputs, Models, Recipe, RunSettings, Terms
from easyrl.recipes.reinforce_pp import ReinforcePP
from easyrl.recipes.reinforce_pp_baseline import ReinforcePPBaseline
from easyrl.recipes.rloo import RLOO
from easyrl.recipes.sft import SFT
from easyrl.recipes.surrogate import ClippedSurrogate
from easyrl.recipes.two_sided import TwoSided

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "GDPO",
    "GRPO",
    "GSPO",
    "RLOO",
    "SFT",
    "AdvantageInputs",
    "ClippedSurrogate",
    "DrGRPO",
    "DualClip",
    "GSPOToken",
    "Models",
    "Recipe",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "RunSettings",
    "Terms",
    "TwoSided",
    "aggregation_weights",
    "clipped_surrogate",
    "group_advantages",
    "importance_ratio",
    "importance_weights",
    "kl_estimate",
    "leave_one_out_advantages",
    "normalised",
    "reward_to_go",
    "sequence_ratio",
    "sequence_sums",
]
