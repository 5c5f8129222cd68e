"""RL algorithms: one class in one file each, and the pure functions that they are made of.

Consumes: finished groups (advantages, weights), what the policy says of their tokens (loss). Waits
for: nothing. Unblocked by: nothing. Produces: advantages per response, loss terms per token.
"""

from easyrl.recipes.aggregated import Aggregated
from easyrl.recipes.cispo import CISPO
from easyrl.recipes.dapo import DAPO
from easyrl.recipes.distillation import Distillation
from easyrl.recipes.dpo import DPO
from easyrl.recipes.dr_grpo import DrGRPO
from easyrl.recipes.dual_clip import DualClip
from easyrl.recipes.estimators import (
    aggregation_weights,
    clipped_surrogate,
    generalised_advantages,
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
from easyrl.recipes.online_dpo import OnlineDPO
from easyrl.recipes.pf_ppo import PFPPO
from easyrl.recipes.ppo import PPO
from easyrl.recipes.preference import PairLoss, SampledPairs
from easyrl.recipes.recipe import (
    AdvantageInputs,
    Models,
    Recipe,
    RunSettings,
    Teacher,
    Terms,
    ValueTerms,
)
from easyrl.recipes.reinforce_pp import ReinforcePP
from easyrl.recipes.reinforce_pp_baseline import ReinforcePPBaseline
from easyrl.recipes.rloo import RLOO
from easyrl.recipes.rpo import RPO
from easyrl.recipes.sft import SFT
from easyrl.recipes.surrogate import ClippedSurrogate
from easyrl.recipes.turn_grpo import TurnGRPO
from easyrl.recipes.two_sided import TwoSided

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "GDPO",
    "GRPO",
    "GSPO",
    "PFPPO",
    "PPO",
    "RLOO",
    "RPO",
    "SFT",
    "AdvantageInputs",
    "Aggregated",
    "ClippedSurrogate",
    "Distillation",
    "DrGRPO",
    "DualClip",
    "GSPOToken",
    "Models",
    "OnlineDPO",
    "PairLoss",
    "Recipe",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "RunSettings",
    "SampledPairs",
    "Teacher",
    "Terms",
    "TurnGRPO",
    "TwoSided",
    "ValueTerms",
    "aggregation_weights",
    "clipped_surrogate",
    "generalised_advantages",
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
