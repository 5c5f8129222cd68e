"""Control experiments, ``scoring.shuffle_rewards``: rewards that teach nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from easyrl.runtime.seeding import sample_seed
from easyrl.schema import RolloutGroup, Score


def scored_function(
    shuffle: bool | Literal["across_prompts"], seed: int
) -> Callable[[RolloutGroup], RolloutGroup]:
    """The group with the scores that it is trained with."""
    if shuffle == "across_prompts":
        return ScoresOfAnotherPrompt(seed)
    return partial(_permuted, seed=seed) if shuffle else lambda group: group


@dataclass
class ScoresOfAnotherPrompt:
    """Gives each group the scores of the group that came before it; the first is permuted.

    A permutation inside the group leaves the mean of a prompt's rewards with the prompt: the
    expected reward of its right responses, and of its wrong ones, is that mean. The group's mean as
    baseline takes it away. With another one, a critic's or the batch's, a response is rewarded
    for being of an easy prompt, and for each right response beside it and itself (1 / G).
    """

    seed: int
    _before: tuple[Score, ...] | None = None

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        """Raises ``ValueError`` where the other prompt has another number of responses."""
        scores, self._before = self._before, group.scores
        if scores is None:
            return _permuted(group, self.seed)
        if len(scores) != len(group.scores):
            raise ValueError(
                f"scoring.shuffle_rewards: prompt {group.prompt.index} of epoch "
                f"{group.prompt.epoch} has {len(group.scores)} responses, the one before "
                f"{len(scores)}"
            )
        return replace(group, scores=scores)


def _permuted(group: RolloutGroup, seed: int) -> RolloutGroup:
    key = sample_seed(seed, group.prompt.epoch, group.prompt.index, -1)
    order = np.random.default_rng(key).permutation(len(group.scores))
    return replace(group, scores=tuple(group.scores[place] for place in order))
