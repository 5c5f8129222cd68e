"""GRPO that rejects a share of the groups, whatever their rewards (``benchmarks.chaos``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from easyrl.recipes import GRPO, RunSettings
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class Rejecting(GRPO):
    """GRPO; a prompt's group is rejected with probability ``reject``, always the same ones."""

    reject: float = 0.3

    def accepts(self, group: RolloutGroup, run: RunSettings) -> str | None:
        drawn = np.random.default_rng([run.seed, *group.prompt.key]).random()
        return "its number is up" if drawn < self.reject else None
