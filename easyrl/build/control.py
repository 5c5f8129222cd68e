"""Control experiments, ``scoring.shuffle_rewards``: rewards that teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Literal

import numpy as np

from easyrl.runtime.seeding import sample_seed
from easyrl.schema import Completion, RolloutGroup, Score


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

    The rewards of an episode's turns, whose advantages are of the group alone, are permuted in it.
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
        own = _unmasked(group.scores)
        # as often as needed, where rollouts have failed
        given = islice(cycle(scores[place] for place in _unmasked(scores)), len(own))
        return replace(
            group,
            scores=_at(group, own, list(given)),
            completions=_turns_permuted(group, _rng(group, self.seed)),
        )


def _permuted(group: RolloutGroup, seed: int) -> RolloutGroup:
    rng = _rng(group, seed)
    own = _unmasked(group.scores)
    scores = [group.scores[own[place]] for place in rng.permutation(len(own))]
    return replace(group, scores=_at(group, own, scores), completions=_turns_permuted(group, rng))


def _unmasked(scores: Sequence[Score]) -> list[int]:
    return [place for place, score in enumerate(scores) if not score.masked]


def _at(group: RolloutGroup, places: Sequence[int], scores: Sequence[Score]) -> tuple[Score, ...]:
    """The group's scores with ``scores`` at ``places``; masked ones stay where they are."""
    given = dict(zip(places, scores, strict=True))
    return tuple(given.get(place, score) for place, score in enumerate(group.scores))


def _rng(group: RolloutGroup, seed: int) -> np.random.Generator:
    return np.random.default_rng(sample_seed(seed, group.prompt.epoch, group.prompt.index, -1))


def _turns_permuted(group: RolloutGroup, rng: np.random.Generator) -> tuple[Completion, ...]:
    """The group's completions, the rewards of their k-th turns permuted among those that have one.

    Else a recipe of turns would learn from them whatever the scores are.
    """
    rewards = [[] if c.episode is None else list(c.episode.turn_rewards) for c in group.completions]
    if not any(rewards):
        return group.completions
    for k in range(max(map(len, rewards))):
        those = [own for own in rewards if k < len(own)]
        order = rng.permutation(len(those))
        for own, value in zip(those, [those[place][k] for place in order], strict=True):
            own[k] = value
    return tuple(
        c if c.episode is None else replace(c, episode=replace(c.episode, turn_rewards=tuple(own)))
        for c, own in zip(group.completions, rewards, strict=True)
    )
