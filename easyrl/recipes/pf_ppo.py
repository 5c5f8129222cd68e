"""PF-PPO: Policy Filtration for PPO (Zhang et al. 2024, arXiv 2409.06957)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from easyrl.recipes.ppo import PPO
from easyrl.recipes.recipe import RunSettings
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class PFPPO(PPO):
    r"""PPO on those of a group's responses whose rewards can be relied on: the ends of its ranking.

    The N responses of a prompt are ranked by their rewards, the best first, and the filtered policy
    gives the i-th with probability w_i (section 4):

    .. math::
        w^{BR} = \Big(\tfrac12, \tfrac{1}{2(N-1)}, \ldots, \tfrac{1}{2(N-1)}\Big), \quad
        w^{BW} = \Big(\tfrac12, 0, \ldots, 0, \tfrac12\Big), \quad w^{BoN} = (1, 0, \ldots, 0)

    Two of the N = 5 responses are trained on average (table 4). Here they are exactly two, and
    their expected shares are w: the best, with another one drawn evenly (``best_random``) or with
    the worst (``best_worst``); with ``best_of_n`` the best alone. Among equal rewards the ranking
    is drawn, by the run's seed and the prompt. All else is PPO's, of the responses that are left.

    The paper finds ``best_random`` and ``best_worst`` close to each other, and ``best_of_n`` worse
    than PPO (table 2). It prints 5 responses, a learning rate of 5e-7 for the policy and 9e-6 for
    the critic, and normalised advantages (section 5.3), but neither gamma and lambda nor clips.
    Its normalised rewards are not done.
    """

    filter: Literal["best_random", "best_worst", "best_of_n"] = "best_random"

    def select(self, group: RolloutGroup, run: RunSettings) -> Sequence[int]:
        rng = np.random.default_rng([run.seed, group.prompt.epoch, group.prompt.index])
        order = rng.permutation(len(group.completions))  # decides among equal rewards
        best_first = order[np.argsort(-self.rewards(group, run)[order], kind="stable")].tolist()
        if self.filter == "best_of_n" or len(best_first) == 1:
            return best_first[:1]
        other = len(best_first) - 1
        if self.filter == "best_random":
            other = int(rng.integers(1, len(best_first)))
        return [best_first[0], best_first[other]]
