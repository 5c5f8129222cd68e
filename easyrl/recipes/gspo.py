"""GSPO: Group Sequence Policy Optimization (Zheng et al. 2025, arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from easyrl.recipes.estimators import sequence_ratio
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.recipe import Span, Terms


@dataclass(frozen=True)
class GSPO(GRPO):
    r"""GRPO with the ratio, and so the clip, of whole responses.

    .. math::
        L = -\frac{1}{G} \sum_i \min(s_i A_i, \mathrm{clip}(s_i, 1 - \epsilon_{low},
            1 + \epsilon_{high}) A_i) \quad \text{(eq. 5)}, \quad
        A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)} \quad \text{(eq. 6)}

        s_i = \Big( \frac{\pi(o_i)}{\pi_{old}(o_i)} \Big)^{1 / |o_i|}
            = \exp\Big( \frac{1}{|o_i|} \sum_t \log \frac{\pi_{i,t}}{\pi_{old,i,t}} \Big)
            \quad \text{(eq. 7)}

    over the trained tokens of a response. Defaults as published (§5.1): the clip is 3e-4 below and
    4e-4 above, as the ratio of a response varies far less than that of a token. No KL: the
    objective has none.
    """

    clip_eps_low: PositiveFloat = 3e-4
    clip_eps_high: PositiveFloat = 4e-4
    kl_coef: NonNegativeFloat = 0.0

    @property
    def span(self) -> Span:
        return "sequence"

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.kl_in_reward_coef > 0:
            problems.append(
                "kl_in_reward_coef: gives each token an advantage of its own, and gspo has one for "
                "a response; use recipe.name: gspo_token, or recipe.kl_coef"
            )
        return problems

    def ratio(self, logprobs: Tensor, terms: Terms) -> Tensor:
        log_ratio = logprobs - terms.old_logprobs
        return sequence_ratio(log_ratio, terms.sequence_index, len(terms.sequences))
