"""Two-sided clipping of GRPO (INTELLECT-2, arXiv 2505.07291, §3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from easyrl.recipes.estimators import Aggregation
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.recipe import Terms


@dataclass(frozen=True)
class TwoSided(GRPO):
    r"""GRPO with an upper bound on the ratio where the advantage is negative.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \min(\min(\rho_{i,t}, \delta) A_i,
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon) A_i)

    GRPO's clip does not act there, and one token of a large ratio can dominate a gradient. Defaults
    as INTELLECT-2 was trained (§4.1): epsilon 0.2, delta 4, a mean over tokens, KL 0.001, entropy
    1e-4, and groups of equal rewards replaced (§3.3).
    """

    aggregation: Aggregation = "token"
    delta: PositiveFloat = 4.0  # bound on the ratio; has to be above 1 + clip_eps_high
    kl_coef: NonNegativeFloat = 0.001
    entropy_coef: float = 1e-4
    dynamic_sampling: bool = True

    ratio_keys = ("clip_eps_low", "clip_eps_high", "delta")

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.delta <= 1 + self.clip_eps_high:
            problems.append(
                f"delta: {self.delta} is not above 1 + recipe.clip_eps_high = "
                f"{1 + self.clip_eps_high}, where it would stop updates that the clip lets "
                "through; set a higher one (published: 4)"
            )
        return problems

    def surrogate(self, logprobs: Tensor, advantages: Tensor, terms: Terms) -> Tensor:
        ratio = self.ratio(logprobs, terms)
        clipped = ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high)
        return torch.minimum(ratio.clamp(max=self.delta) * advantages, clipped * advantages)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        bounded = {"clip_delta": (advantages < 0) & (ratio > self.delta)}
        return super().clipped(ratio, advantages) | bounded
