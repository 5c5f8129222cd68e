"""Scores of episodes: what their environments have said of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from easyrl.config import OnFailure
from easyrl.episodes.player import EpisodeFailed
from easyrl.schema import Completion, Prompt, RewardError, Score

REWARD = "reward"  # component of every environment's own


@dataclass
class EpisodeScorer:
    """A ``Scorer`` whose rewards came with the episodes.

    Components are called ``ENVIRONMENT/NAME``. A rollout that failed scores 0, as a reward function
    that fails does, or is masked: as its environment's ``on_failure`` has it.
    """

    truncated_reward: float | None = None  # of an episode that is (``Completion.truncated``)
    _: KW_ONLY
    on_failure: Mapping[str, OnFailure] = field(default_factory=dict)  # by environment; else mask
    # Rollouts of an environment that fail over as many rollouts in a row as a batch has end the
    # run; None: none do.
    groups_per_batch: int | None = None  # of this rank
    num_generations: int = 1  # rollouts of a group

    def __post_init__(self) -> None:
        self._num_scored = 0
        self._failed_in_a_row: Counter[str] = Counter()  # by environment
        self._row_began: dict[str, int] = {}  # rollouts of all that were scored before each row

    async def score_sample(self, prompt: Prompt, completion: Completion) -> Score:
        """Raises ``RewardError`` where an environment's rollouts all fail."""
        episode = completion.episode
        assert episode is not None
        self._num_scored += 1
        if episode.failure is not None:
            self._stop_if_all_failed(episode.environment, episode.failure, prompt)
            is_masked = self.on_failure.get(episode.environment, "mask") == "mask"
            return Score(0.0, {}, failed=True, masked=is_masked)
        self._failed_in_a_row[episode.environment] = 0
        reward = episode.reward
        if self.truncated_reward is not None and completion.truncated:
            reward = self.truncated_reward
        said = {REWARD: episode.reward} | dict(episode.components)
        return Score(reward, {f"{episode.environment}/{name}": v for name, v in said.items()})

    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion], sample_scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        """Raises ``EpisodeFailed`` where no sample has a turn."""
        episodes = [each.episode for each in completions if each.episode is not None]
        if not any(episode.turns for episode in episodes):
            raise EpisodeFailed(episodes[-1].failure)
        return tuple(sample_scores)

    def _stop_if_all_failed(self, environment: str, failure: str, prompt: Prompt) -> None:
        """Nothing but failures teaches nothing. Raises ``RewardError``."""
        if self._failed_in_a_row[environment] == 0:
            self._row_began[environment] = self._num_scored - 1
        self._failed_in_a_row[environment] += 1
        if self.groups_per_batch is None:
            return
        in_a_row = self._failed_in_a_row[environment]
        over = self._num_scored - self._row_began[environment]
        # of an environment with a small share one bad prompt is no reason to end the run
        least = min(2, self.groups_per_batch) * self.num_generations
        if over < self.groups_per_batch * self.num_generations or in_a_row < least:
            return
        at = f" ({prompt.location})" if prompt.location else ""
        mode = self.on_failure.get(environment, "mask")
        raise RewardError(
            f"environments: all {in_a_row} rollouts of {environment} in a row failed, while as "
            f"many as a batch has were played, which on_failure={mode} is not for; the last, on "
            f"prompt {prompt.index} of epoch {prompt.epoch}{at}: {failure}; correct it, or remove "
            "the environment (the log has the first failure of each kind with its traceback)"
        )
