"""A loss over sequences: the ratio of whole responses (GSPO, arXiv 2507.18071, eq. 5 and 7).

python -m easyrl.demo --run-dir runs/sequence-ratio trainer.updates_per_batch=2 \
    'recipe={file: examples/recipes/sequence_ratio.py, name: SequenceRatio}'
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from easyrl.recipes import Models, Recipe, clipped_surrogate, group_advantages


@dataclass(frozen=True)
class SequenceRatio(Recipe):
    """Loss: -min(s A, clip(s, 1 - low, 1 + high) A), s = (pi / pi_old)^(1 / length)."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    span = "sequence"
    needs = Models(old_policy=True)
    advantage_only = True
    ratio_keys: ClassVar = ("clip_low", "clip_high")

    def advantages(self, groups, run, inputs):
        return [group_advantages(group.rewards, "group_std") for group in groups]

    def token_weights(self, group, run):
        return [np.full(len(c.token_ids), 1 / max(1, c.loss_mask.sum())) for c in group.completions]

    def denominator(self, groups, run):
        return float(sum(len(group.completions) for group in groups))

    def loss(self, logprobs, entropy, terms):
        ratio = self.ratio(logprobs, terms)
        advantages = means(terms.advantages, terms)
        return -clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)

    def metrics(self, logprobs, entropy, terms):
        return {"sequence_ratio_max": self.ratio(logprobs, terms).max()}

    def ratio(self, logprobs, terms):
        return torch.exp(means(logprobs - terms.old_logprobs, terms))


def means(values, terms):
    """[Q] of each sequence; its tokens' weights add up to 1."""
    zeros = values.new_zeros(int(terms.sequence_index.max()) + 1)
    return zeros.index_add(0, terms.sequence_index, terms.loss_weights * values)
