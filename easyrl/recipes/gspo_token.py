"""GSPO-token: GSPO with an advantage per token (Zheng et al. 2025, arXiv 2507.18071, §4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from easyrl.recipes.gspo import GSPO
from easyrl.recipes.recipe import Terms
from easyrl.recipes.surrogate import ClippedSurrogate


@dataclass(frozen=True)
class GSPOToken(GSPO):
    r"""GSPO whose advantages may differ from token to token.

    .. math::
        L = -\frac{1}{G} \sum_i \frac{1}{|o_i|} \sum_t \min(s_{i,t} A_{i,t},
            \mathrm{clip}(s_{i,t}, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_{i,t}), \quad
        s_{i,t} = \mathrm{sg}[s_i] \cdot \frac{\pi_{i,t}}{\mathrm{sg}[\pi_{i,t}]}

    with sg the stop-gradient and GSPO's s_i: the value is that of the sequence, the gradient that
    of the token. Loss and gradient are GSPO's where a response has one advantage for all its
    tokens; ``kl_in_reward_coef`` makes them differ.
    """

    def problems(self) -> list[str]:
        return ClippedSurrogate.problems(self)  # what GSPO refuses is what this is for

    def ratio(self, logprobs: Tensor, terms: Terms) -> Tensor:
        sequence = super().ratio(logprobs, terms).detach()
        return sequence * torch.exp(logprobs - logprobs.detach())
