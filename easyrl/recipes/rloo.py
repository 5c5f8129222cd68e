"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat
from torch import Tensor

from easyrl.recipes.estimators import (
    KLEstimator,
    kl_estimate,
    leave_one_out_advantages,
    sequence_sums,
)
from easyrl.recipes.recipe import (
    AdvantageInputs,
    Advantages,
    Models,
    Recipe,
    RunSettings,
    Span,
    Terms,
)
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class RLOO(Recipe):
    r"""REINFORCE on whole responses, each against the mean of its group's others.

    .. math::
        L = -\frac{1}{G} \sum_i \Big( R_i - \frac{1}{G - 1} \sum_{j \ne i} R_j \Big)
            \log \pi(o_i), \quad
        R_i = r_i - \beta \log \frac{\pi_{old}(o_i)}{\pi_{ref}(o_i)}

    The KL is in the reward, the baseline's rewards too; ``pi_old`` sampled the responses and R has
    no gradient. A response without a trained token is left out of the KL's baseline. There is no
    ratio and no clip: with several updates per batch the later ones are off-policy and not
    corrected. 0.05 is TRL's default of beta.
    """

    kl_in_reward_coef: NonNegativeFloat = 0.05  # beta; 0: no reference model
    kl_in_reward_estimator: KLEstimator = "k1"  # of each token; the equation's is k1, summed

    has_ratio: ClassVar[bool] = False

    def notices(self) -> list[str]:
        if not self.is_set("kl_in_reward_estimator") or self.kl_in_reward_coef > 0:
            return []
        return [
            "kl_in_reward_estimator: has no effect without a KL in the reward; remove it, or set "
            "recipe.kl_in_reward_coef above 0"
        ]

    @property
    def needs(self) -> Models:
        return Models(reference=self.kl_in_reward_coef > 0, old_policy=self.kl_in_reward_coef > 0)

    @property
    def span(self) -> Span:
        """The baseline has the KL of the group's other responses."""
        return "token" if self.kl_in_reward_coef == 0 else "group"

    @property
    def advantage_only(self) -> bool:
        return type(self).loss is RLOO.loss and self.kl_in_reward_coef == 0

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        return [leave_one_out_advantages(group.rewards) for group in groups]

    def denominator(self, groups: Sequence[RolloutGroup], run: RunSettings) -> float:
        """Responses, those without a trained token too."""
        return float(sum(len(self.select(group, run)) for group in groups))

    def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
        advantages = terms.advantages
        if terms.reference_logprobs is not None and self.kl_in_reward_coef > 0:
            advantages = advantages - self.kl_in_reward_coef * self._kl_over_others(terms)
        return -terms.loss_weights * advantages * logprobs

    def metrics(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> dict[str, Tensor]:
        """Mean KL (k3) to the reference."""
        if terms.reference_logprobs is None:
            return {}
        return {"kl_sum": kl_estimate(logprobs, terms.reference_logprobs, "k3").sum()}

    def _kl_over_others(self, terms: Terms) -> Tensor:
        """[n], KL estimate of the token's response less the mean of its group's others."""
        assert terms.reference_logprobs is not None
        num_sequences, group = len(terms.sequences), terms.group_of_sequence
        of_tokens = kl_estimate(
            terms.old_logprobs, terms.reference_logprobs, self.kl_in_reward_estimator
        )
        kl = sequence_sums(of_tokens, terms.sequence_index, num_sequences)
        in_group = sequence_sums(kl, group, num_sequences)[group]
        size = sequence_sums(kl.new_ones(num_sequences), group, num_sequences)[group]
        others = (in_group - kl) / (size - 1).clamp(min=1)
        return (kl - others)[terms.sequence_index]
