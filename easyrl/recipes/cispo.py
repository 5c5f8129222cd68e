"""CISPO: Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from easyrl.recipes.estimators import Aggregation
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.recipe import Terms


@dataclass(frozen=True)
class CISPO(GRPO):
    r"""REINFORCE with an importance weight that is clipped, so that no token loses its gradient.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \mathrm{sg}(\hat\rho_{i,t}) A_i \log \pi_{i,t}
            \quad \text{(eq. 4)}, \quad
        \hat\rho_{i,t} = \mathrm{clip}(\rho_{i,t}, 1 - \epsilon_{low}, 1 + \epsilon_{high})
            \quad \text{(eq. 5)}

    with sg the stop-gradient and GRPO's advantages; no KL. The paper has no lower bound in effect
    (as here: 1 - 1 = 0) and does not print the upper one; 1 + 4 is what TRL recommends.
    """

    aggregation: Aggregation = "token"
    clip_eps_low: PositiveFloat = 1.0
    clip_eps_high: PositiveFloat = 4.0
    kl_coef: NonNegativeFloat = 0.0

    def surrogate(self, logprobs: Tensor, advantages: Tensor, terms: Terms) -> Tensor:
        ratio = self.ratio(logprobs, terms).detach()
        weight = ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high)
        return weight * advantages * logprobs

    def clipped(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Whatever the advantage's sign: the weight is bounded, the gradient is not stopped."""
        return {
            "clip_low": ratio < 1 - self.clip_eps_low,
            "clip_high": ratio > 1 + self.clip_eps_high,
        }
