"""DPO: Direct Preference Optimization (Rafailov et al. 2023, arXiv 2305.18290)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

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
class DPO(Recipe):
    r"""Direct Preference Optimization (eq. 7), on pairs of a chosen and a rejected completion.

    .. math::
        L = -\log \sigma\big(\hat r(x, y_w) - \hat r(x, y_l)\big), \quad
        \hat r(x, y) = \beta \log \frac{\pi(y \mid x)}{\pi_{ref}(y \mid x)}

    A mean over the pairs of an optimizer step. The reference is the initial policy. With label
    smoothing each preference is taken to be the wrong way round with probability epsilon:
    (1 - epsilon) times the loss, plus epsilon times that of the swapped pair.
    """

    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # epsilon

    source: ClassVar[Literal["rollouts", "records"]] = "records"
    pairs: ClassVar[bool] = True

    @property
    def needs(self) -> Models:
        return Models(reference=True)

    @property
    def span(self) -> Span:
        return "group"

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        """The signs of the two rewards in the margin: chosen, then rejected."""
        return [np.array([1.0, -1.0]) for _ in groups]

    def denominator(self, groups: Sequence[RolloutGroup], run: RunSettings) -> float:
        """Pairs."""
        return float(len(groups))

    def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
        margins, pairs = self._margins(logprobs, terms)
        losses = -(1 - self.label_smoothing) * logsigmoid(margins)
        if self.label_smoothing > 0:
            losses = losses - self.label_smoothing * logsigmoid(-margins)
        weights = terms.loss_weights.new_zeros(len(margins)).index_put((pairs,), terms.loss_weights)
        return weights * losses

    def metrics(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> dict[str, Tensor]:
        """Means over pairs: share whose chosen reward is the larger, margin, both rewards."""
        margins, pairs = self._margins(logprobs, terms)
        rewards = self._rewards(logprobs, terms)
        counted = {
            "accuracy": (margins > 0).to(margins).sum(),
            "margin": margins.sum(),
            "chosen_reward": rewards[terms.advantages > 0].sum(),
            "rejected_reward": rewards[terms.advantages < 0].sum(),
        }
        num_pairs = margins.new_tensor(len(margins))
        named = {f"{name}_sum": value for name, value in counted.items()}
        return named | {f"{name}_num": num_pairs for name in counted}

    def _rewards(self, logprobs: Tensor, terms: Terms) -> Tensor:
        """[n], what each token adds to the implicit reward of its completion."""
        assert terms.reference_logprobs is not None
        return self.beta * (logprobs - terms.reference_logprobs)

    def _margins(self, logprobs: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
        """[pairs], the chosen's reward less the rejected's; int64 [n], the pair of each token."""
        pairs = terms.group_index
        num_pairs = len({key[:2] for key in terms.sequences})
        signed = terms.advantages * self._rewards(logprobs, terms)
        return signed.new_zeros(num_pairs).index_add(0, pairs, signed), pairs
