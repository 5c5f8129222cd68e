"""Scores of episodes: what their environments have said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from easyrl.schema import Completion, Prompt, Score

REWARD = "reward"  # component of every environment's own


@dataclass(frozen=True)
class EpisodeScorer:
    """A ``Scorer`` whose rewards came with the episodes.

    Components are called ``ENVIRONMENT/NAME``. A rollout that failed scores 0, as a reward function
    that fails does.
    """

    truncated_reward: float | None = None  # of an episode that is (``Completion.truncated``)

    async def score_sample(self, prompt: Prompt, completion: Completion) -> Score:
        episode = completion.episode
        assert episode is not None
        if episode.failure is not None:
            return Score(0.0, {}, failed=True)
        reward = episode.reward
        if self.truncated_reward is not None and completion.truncated:
            reward = self.truncated_reward
        said = {REWARD: episode.reward} | dict(episode.components)
        return Score(reward, {f"{episode.environment}/{name}": v for name, v in said.items()})

    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion], sample_scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        return tuple(sample_scores)
