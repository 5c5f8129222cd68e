"""How tokens and responses are averaged: what all recipes with the key ``aggregation`` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.recipes.estimators import Aggregation, aggregation_weights
from easyrl.recipes.recipe import Recipe, RunSettings
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class Aggregated(Recipe):
    """A recipe whose loss is a mean over tokens, or over responses of means over their tokens."""

    aggregation: Aggregation = "token"  # weights of the tokens (``estimators.py``)

    def token_weights(self, group: RolloutGroup, run: RunSettings) -> Sequence[np.ndarray]:
        return [
            aggregation_weights(self.trained_tokens(c, run), self.aggregation, run.max_tokens)
            for c in group.completions
        ]

    def denominator(self, groups: Sequence[RolloutGroup], run: RunSettings) -> float:
        """Trained tokens for ``token``; else responses, those without a trained token too."""
        if self.aggregation == "token":
            return super().denominator(groups, run)
        return float(sum(len(self.select(group, run)) for group in groups))
