"""DPO: Direct Preference Optimization (Rafailov et al. 2023, arXiv 2305.18290)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from easyrl.recipes.preference import PairLoss
from easyrl.recipes.recipe import AdvantageInputs, Advantages, RunSettings
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class DPO(PairLoss):
    r"""Direct Preference Optimization (eq. 7), on pairs of a chosen and a rejected completion.

    .. math::
        L = -\log \sigma\big(\hat r(x, y_w) - \hat r(x, y_l)\big), \quad
        \hat r(x, y) = \beta \log \frac{\pi(y \mid x)}{\pi_{ref}(y \mid x)}

    A mean over the pairs of an optimizer step. The reference is the initial policy. With label
    smoothing each preference is taken to be the wrong way round with probability epsilon:
    (1 - epsilon) times the loss, plus epsilon times that of the swapped pair.
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # epsilon

    source: ClassVar[Literal["rollouts", "records"]] = "records"
    pairs: ClassVar[bool] = True

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        """The signs of the two rewards in the margin: chosen, then rejected."""
        return [np.array([1.0, -1.0]) for _ in groups]

    def pair_losses(self, margins: Tensor, reward_margins: Tensor) -> Tensor:
        losses = -(1 - self.label_smoothing) * logsigmoid(margins)
        if self.label_smoothing > 0:
            losses = losses - self.label_smoothing * logsigmoid(-margins)
        return losses
