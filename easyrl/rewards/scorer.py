"""Runs the rewards of a group in worker processes and adds them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from easyrl.config import RewardConfig, ScoringConfig
from easyrl.rewards import worker
from easyrl.rewards.functions import RewardFunctionError
from easyrl.runtime.workers.worker_pool import WorkerDied, WorkerPool, WorkerTimeout
from easyrl.schema import Completion, Prompt, Score


class RewardError(RuntimeError):
    """A reward could not be had; the message names reward, prompt and cause."""


@dataclass(frozen=True, slots=True)
class SampleScores:
    """What the rewards of one scope say of one response."""

    components: Mapping[str, float]  # by reward name
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
    num_failed: Counter[str] = field(default_factory=Counter)  # calls, by reward

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
            reward = sum(own.weight * components[own.label] for own in self.rewards)
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
                    own[reward.label] = value
        return [SampleScores(own, failed) for own in components]

    async def _call(
        self, index: int, prompt: Prompt, token_ids: Sequence[np.ndarray]
    ) -> list[float] | None:
        """One reward's values; ``None`` if it failed and counts as zero."""
        reward = self.rewards[index]
        retry = self.scoring.on_reward_error == "retry"
        num_calls = 1 + (self.scoring.max_reward_retries if retry else 0)
        for call in range(1, num_calls + 1):
            try:
                return await self.workers.call(
                    worker.score_reward,
                    index,
                    prompt,
                    token_ids,
                    timeout_s=reward.timeout_s,
                    kind=index,
                    last=self.last,
                )
            except (RewardFunctionError, WorkerTimeout, WorkerDied) as error:
                self.num_failed[reward.label] += 1
                if self.scoring.on_reward_error == "zero":
                    return None
                if call == num_calls:
                    raise RewardError(self._message(reward, prompt, error, num_calls)) from error
        raise AssertionError("unreachable")

    def _message(
        self, reward: RewardConfig, prompt: Prompt, error: Exception, num_calls: int
    ) -> str:
        source = reward.label if reward.file is None else f"{reward.label} in {reward.file}"
        cause = str(error)
        if isinstance(error, WorkerTimeout):
            cause = f"no result within timeout_s={reward.timeout_s}; its worker was killed"
        elif isinstance(error, WorkerDied):
            cause = f"its worker process died ({error})"
        tried = f" ({num_calls} calls)" if num_calls > 1 else ""
        return (
            f"reward {source} failed on prompt {prompt.index} of epoch {prompt.epoch}{tried}: "
            f"{cause}\n(scoring.on_reward_error=zero goes on with 0.0, =retry tries again)"
        )
