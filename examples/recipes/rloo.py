"""REINFORCE with a leave-one-out baseline (RLOO: Ahmadian et al. 2024, arXiv 2402.14740, eq. 8).

python -m easyrl.demo --run-dir runs/rloo 'recipe={file: examples/recipes/rloo.py, name: RLOO}'
"""

from dataclasses import dataclass

from easyrl.recipes import Recipe


@dataclass(frozen=True)
class RLOO(Recipe):
    """Loss: -(r_i - mean of the other rewards) log pi(response i), mean over responses."""

    advantage_only = True

    def advantages(self, groups, run, inputs):
        means = [(g.rewards.sum() - g.rewards) / (len(g.rewards) - 1) for g in groups]
        return [group.rewards - mean for group, mean in zip(groups, means, strict=True)]

    def denominator(self, groups, run):
        return float(sum(len(group.completions) for group in groups))

    def loss(self, logprobs, entropy, terms):
        return -terms.loss_weights * terms.advantages * logprobs
