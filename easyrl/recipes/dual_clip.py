"""Dual-clip PPO on group-relative advantages (Ye et al. 2020, arXiv 1912.09729)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from easyrl.recipes.estimators import Aggregation
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.recipe import Terms


@dataclass(frozen=True)
class DualClip(GRPO):
    r"""PPO's surrogate with a lower bound where the advantage is negative.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \begin{cases}
            \max(\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A), c A) & A < 0 \\
            \min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A) & A \ge 0
        \end{cases} \quad \text{(eq. 5)}

    The paper trains a game's agents with PPO's advantages, here they are GRPO's; c = 3 as there.
    With c above 1 + epsilon it is ``two_sided`` with delta = c.
    """

    aggregation: Aggregation = "token"
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0  # c
    kl_coef: NonNegativeFloat = 0.0

    ratio_keys = ("clip_eps_low", "clip_eps_high", "clip_ratio_c")

    def surrogate(self, logprobs: Tensor, advantages: Tensor, terms: Terms) -> Tensor:
        plain = super().surrogate(logprobs, advantages, terms)
        bounded = torch.maximum(plain, self.clip_ratio_c * advantages)
        return torch.where(advantages < 0, bounded, plain)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        bounded = {"clip_dual": (advantages < 0) & (ratio > self.clip_ratio_c)}
        return super().clipped(ratio, advantages) | bounded
