"""GRPO on two responses of each group: the best and the worst, with the whole group's baseline.

python -m easyrl.demo --run-dir runs/best-and-worst \
    'recipe={file: examples/recipes/best_and_worst.py, name: BestAndWorst, kl_coef: 0.0}'
"""

from dataclasses import dataclass

import numpy as np

from easyrl.recipes import GRPO


@dataclass(frozen=True)
class BestAndWorst(GRPO):
    """Of responses that score alike, the first is the worst and the last the best."""

    def select(self, group, run):
        order = np.argsort(group.rewards, kind="stable")
        return order[0], order[-1]
