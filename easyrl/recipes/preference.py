"""Preference pairs: the margin of their implicit rewards, and the pair that a group gives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveFloat
from torch import Tensor

from easyrl.recipes.dynamic_sampling import DynamicSampling
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
class PairLoss(Recipe):
    r"""A mean over groups of a function of the margin between two implicit rewards.

    .. math::
        m = \hat r(x, y_w) - \hat r(x, y_l), \quad
        \hat r(x, y) = \beta \log \frac{\pi(y \mid x)}{\pi_{ref}(y \mid x)}

    over the trained tokens of the chosen completion w and the rejected one l (DPO, arXiv
    2305.18290, eq. 5). The reference is the initial policy. The advantages are the pair's reward
    margin, how much better w is than l, and its negative; a group without a margin has no loss.
    """

    beta: PositiveFloat = 0.1

    @property
    def needs(self) -> Models:
        return Models(reference=True)

    @property
    def span(self) -> Span:
        return "group"

    def denominator(self, groups: Sequence[RolloutGroup], run: RunSettings) -> float:
        """Groups, those without a pair too."""
        return float(len(groups))

    @abstractmethod
    def pair_losses(self, margins: Tensor, reward_margins: Tensor) -> Tensor:
        """[P], of the implicit margins [P], which carry gradient, and the rewards' [P]."""

    def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
        """[P], a term for each of the row's groups."""
        margins, reward_margins, groups = self._margins(logprobs, terms)
        weights = margins.new_zeros(len(margins)).index_put((groups,), terms.loss_weights)
        losses = weights * self.pair_losses(margins, reward_margins)
        return losses.where(reward_margins > 0, 0.0)

    def metrics(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> dict[str, Tensor]:
        """Means over pairs: share whose chosen reward is the larger, margin, both rewards."""
        margins, reward_margins, _ = self._margins(logprobs, terms)
        rewards = self._rewards(logprobs, terms)
        is_pair = reward_margins > 0
        counted = {
            "accuracy": (margins > 0).to(margins).sum(),
            "margin": margins.sum(),
            "chosen_reward": rewards[terms.advantages > 0].sum(),
            "rejected_reward": rewards[terms.advantages < 0].sum(),
        }
        named = {f"{name}_sum": value for name, value in counted.items()}
        return named | {f"{name}_num": is_pair.to(margins).sum() for name in counted}

    def _rewards(self, logprobs: Tensor, terms: Terms) -> Tensor:
        """[n], what each token adds to the implicit reward of its completion."""
        assert terms.reference_logprobs is not None
        return self.beta * (logprobs - terms.reference_logprobs)

    def _margins(self, logprobs: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
        """[P] each of the row's groups: the chosen's implicit reward less the rejected's, 0 where
        there is no pair; the margin of the rewards. And int64 [n], the group of each token."""
        groups = terms.group_index
        num_groups = len({key[:2] for key in terms.sequences})
        signed = terms.advantages.sign() * self._rewards(logprobs, terms)
        margins = signed.new_zeros(num_groups).index_add(0, groups, signed)
        reward_margins = margins.new_zeros(num_groups)
        return margins, reward_margins.index_put((groups,), terms.advantages.abs()), groups


@dataclass(frozen=True)
class SampledPairs(PairLoss, DynamicSampling):
    """Pairs of what the policy has sampled: of a group's responses the best and the worst.

    A group whose rewards are all equal has no pair: its loss is 0, or with ``dynamic_sampling``
    another prompt's is sampled instead. There is no ratio to the policy that sampled the pairs:
    later updates of a batch are off-policy.
    """

    source: ClassVar[Literal["rollouts", "records"]] = "rollouts"
    pairs: ClassVar[bool] = False
    has_ratio: ClassVar[bool] = False

    @property
    def advantage_only(self) -> bool:
        return type(self).loss is PairLoss.loss

    def select(self, group: RolloutGroup, run: RunSettings) -> Sequence[int]:
        """The worst and the best; of those that score alike the first is the worse."""
        order = np.argsort(group.rewards, kind="stable")
        return [int(order[0]), int(order[-1])]

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        """Of the best by how much it is better than the worst, of that one the negative; else 0."""
        advantages = []
        for group in groups:
            worst, best = self.select(group, run)
            own = np.zeros_like(group.rewards)
            own[best] = group.rewards[best] - group.rewards[worst]
            own[worst] = -own[best]
            advantages.append(own)
        return advantages
