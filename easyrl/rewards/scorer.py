"""Runs the rewards of a group in worker processes and adds them up.

A reward without an opinion on a response is no summand of its sum.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from easyrl.config import RewardConfig, ScoringConfig
from easyrl.rewards import worker
from easyrl.rewards.functions import RewardFunctionError, Value
from easyrl.runtime.busy_time import BusyTime
from easyrl.runtime.workers.worker_pool import WorkerDied, WorkerPool, WorkerTimeout
from easyrl.schema import Completion, Prompt, RewardError, Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampleScores:
    """What the rewards of one scope say of one response."""

    components: Mapping[str, float]  # of ``Score``
    failed: bool  # one of them raised or timed out, and was scored zero


@dataclass(eq=False)
class Scorer:
    """Scores responses as they return, and groups when they are complete.

    The pool's workers must have run ``rewards.worker.initialize`` with the same ``rewards``.
    """

    rewards: Sequence[RewardConfig]
    scoring: ScoringConfig
    workers: WorkerPool
    _: KW_ONLY
    truncated_reward: float | None = None  # of a response cut off at its longest; None: as scored
    last: bool = False  # the workers score for others first
    # With on_reward_error: zero a reward that fails in as many calls in a row as a batch has ends
    # the run; None: none does.
    groups_per_batch: int | None = None  # of this rank
    num_generations: int = 1  # responses of a group
    num_failed: Counter[str] = field(default_factory=Counter)  # calls, by reward
    busy: BusyTime = field(default_factory=BusyTime)  # a call runs, or waits for a worker

    def __post_init__(self) -> None:
        self._failed_in_a_row: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()  # reward and type of exception

    async def score_sample(self, prompt: Prompt, completion: Completion) -> SampleScores:
        """Rewards that need one response. Raises ``RewardError``."""
        (scores,) = await self._run("sample", prompt, [completion])
        return scores

    async def score_group(
        self,
        prompt: Prompt,
        completions: Sequence[Completion],
        sample_scores: Sequence[SampleScores],
    ) -> tuple[Score, ...]:
        """Rewards that need the whole group, then the weighted sums; nothing without rewards.

        Raises ``RewardError``.
        """
        if not self.rewards:
            return ()
        group_scores = await self._run("group", prompt, completions)
        scores = []
        for completion, *parts in zip(completions, sample_scores, group_scores, strict=True):
            components = {name: value for part in parts for name, value in part.components.items()}
            reward = sum(own.weight * components.get(own.label, 0.0) for own in self.rewards)
            if self.truncated_reward is not None and completion.truncated:
                reward = self.truncated_reward
            scores.append(Score(reward, components, any(part.failed for part in parts)))
        return tuple(scores)

    async def _run(
        self, scope: str, prompt: Prompt, completions: Sequence[Completion]
    ) -> list[SampleScores]:
        components: list[dict[str, float]] = [{} for _ in completions]
        failed = False
        token_ids = [completion.token_ids for completion in completions]
        for index, reward in enumerate(self.rewards):
            if reward.of_group == (scope == "group"):
                values = await self._call(index, prompt, token_ids)
                failed |= values is None
                for own, value in zip(components, values or [0.0] * len(completions), strict=True):
                    own |= _components(reward.label, value)
        return [SampleScores(own, failed) for own in components]

    async def _call(
        self, index: int, prompt: Prompt, token_ids: Sequence[np.ndarray]
    ) -> list[Value] | None:
        """One reward's values; ``None`` if it failed and counts as zero."""
        reward = self.rewards[index]
        retry = self.scoring.on_reward_error == "retry"
        num_calls = 1 + (self.scoring.max_reward_retries if retry else 0)
        for call in range(1, num_calls + 1):
            try:
                with self.busy.task():
                    values = await self.workers.call(
                        worker.score_reward,
                        index,
                        prompt,
                        token_ids,
                        timeout_s=reward.timeout_s,
                        kind=index,
                        last=self.last,
                    )
                self._failed_in_a_row[reward.label] = 0
                return values
            except (RewardFunctionError, WorkerTimeout, WorkerDied) as error:
                self.num_failed[reward.label] += 1
                self._log_first(reward, prompt, error)
                if self.scoring.on_reward_error == "zero":
                    self._stop_if_all_failed(index, prompt, error)
                    return None
                if call == num_calls:
                    tried = f" ({num_calls} calls)" if num_calls > 1 else ""
                    raise RewardError(
                        f"rewards[{index}]: {_failure(reward, prompt, error, tried)}; correct it "
                        "(scoring.on_reward_error=zero goes on with 0.0, =retry tries again)"
                    ) from error
        raise AssertionError("unreachable")

    def _log_first(self, reward: RewardConfig, prompt: Prompt, error: Exception) -> None:
        """Of each reward and type of exception one failure, with its traceback."""
        kind = error.kind if isinstance(error, RewardFunctionError) else type(error).__name__
        if (reward.label, kind) in self._logged:
            return
        self._logged.add((reward.label, kind))
        frames = ""
        if isinstance(error, RewardFunctionError):
            frames = "".join(f"\n{line}" for line in str(error).splitlines()[1:])
        more = "; more like it are only counted"
        if self.scoring.on_reward_error == "fail":
            more = ""
        logger.warning("%s%s%s", _failure(reward, prompt, error), more, frames)

    def _stop_if_all_failed(self, index: int, prompt: Prompt, error: Exception) -> None:
        """Zeros alone teach nothing. Raises ``RewardError``."""
        reward = self.rewards[index]
        self._failed_in_a_row[reward.label] += 1
        in_a_row = self._failed_in_a_row[reward.label]
        if self.groups_per_batch is None:
            return
        if in_a_row < self.groups_per_batch * (1 if reward.of_group else self.num_generations):
            return
        raise RewardError(
            f"rewards[{index}]: all {in_a_row} calls of {reward.label} in a row failed, as many as "
            f"a batch has, which scoring.on_reward_error=zero is not for; the last: "
            f"{_failure(reward, prompt, error)}; correct it, or remove it from rewards (the log "
            "has the first failure of each kind with its traceback)"
        ) from error


def _components(label: str, value: Value) -> dict[str, float]:
    """What a response's score keeps of one reward's ``value``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {label: value}
    parts = {f"{label}/{part}": number for part, number in value.items() if part != "score"}
    return {label: value["score"]} | parts


def _failure(reward: RewardConfig, prompt: Prompt, error: Exception, tried: str = "") -> str:
    """On one line."""
    source = reward.label if reward.file is None else f"{reward.label} in {reward.file}"
    cause = str(error).partition("\n")[0]
    if isinstance(error, RewardFunctionError) and error.where is not None:
        cause += f" ({error.where})"
    elif isinstance(error, WorkerTimeout):
        cause = f"no result within timeout_s={reward.timeout_s}; its worker was killed"
    elif isinstance(error, WorkerDied):
        cause = f"its worker process died ({error})"
    at = f" ({prompt.location})" if prompt.location else ""
    where = f"prompt {prompt.index} of epoch {prompt.epoch}{at}"
    return f"reward {source} failed on {where}{tried}: {cause}"
