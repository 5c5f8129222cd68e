"""Dynamic sampling: groups without a signal are replaced by other prompts' (DAPO, eq. 11)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from easyrl.recipes.recipe import Recipe, RunSettings
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class DynamicSampling(Recipe):
    """A recipe with the key ``dynamic_sampling``."""

    dynamic_sampling: bool = False  # a group of equal rewards is replaced

    @property
    def rejects(self) -> bool:
        return self.dynamic_sampling or type(self).accepts is not DynamicSampling.accepts

    def accepts(self, group: RolloutGroup, run: RunSettings) -> str | None:
        if self.dynamic_sampling and np.ptp(group.rewards) == 0:
            return "all rewards are equal"
        return None
