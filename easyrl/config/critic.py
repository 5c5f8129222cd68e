"""Section ``critic``: the model that PPO's advantages and returns are made with."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from easyrl.config.base import FilePath, Section


class CriticConfig(Section):
    """The critic of a recipe that has one: a model like the policy with a head for values.

    Schedule, Adam's coefficients, offload and ZeRO stage (2 at most) are the policy's; its loss is
    the recipe's.
    """

    path: FilePath | None = None  # a language model, or a critic that a run has exported; default:
    # model.path
    learning_rate: PositiveFloat = 9e-6  # OpenRLHF's; of PF-PPO (arXiv 2409.06957, section 5.3) too
    weight_decay: NonNegativeFloat = 0.0  # of its AdamW
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no clipping
