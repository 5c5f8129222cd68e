"""A baseline over the whole batch (as in REINFORCE++: Hu 2025, arXiv 2501.03262, eq. 9).

python -m easyrl.demo --run-dir runs/batch-baseline \
    'recipe={file: examples/recipes/batch_baseline.py, name: BatchBaseline}'
"""

from dataclasses import dataclass

import numpy as np

from easyrl.recipes import Recipe


@dataclass(frozen=True)
class BatchBaseline(Recipe):
    """Advantage: (r - mean) / std, both over all responses of the optimizer step.

    So nothing can be trained before the last response is there: the run does not stream. The
    statistics are those of all data-parallel ranks, whichever groups a rank has.
    """

    scope = "batch"
    advantage_only = True

    def advantages(self, groups, run, inputs):
        rewards = np.concatenate(inputs.rewards).astype(np.float64)
        if np.ptp(rewards) == 0:
            return [np.zeros(len(group.rewards)) for group in groups]
        return [(group.rewards - rewards.mean()) / rewards.std() for group in groups]

    def loss(self, logprobs, entropy, terms):
        return -terms.loss_weights * terms.advantages * logprobs
