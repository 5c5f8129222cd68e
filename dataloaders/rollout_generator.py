"""The temporary data generator: a producer of finished groups (periodic asynchrony, paper §4.3).

Knows neither vLLM nor rewards: it is given a ``generate`` callable and a ``Scorer``.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.event_log import Record, ignore
from easyrl.schema import Completion, Prompt, RolloutGroup, Score

Generate = Callable[[Prompt, int, str | None], Awaitable[Completion]]  # prompt, sample, version
SampleScores = TypeVar("SampleScores")


class Scorer(Protocol, Generic[SampleScores]):
    """Scores each response as it returns, and the group when it is complete."""

    async def score_sample(self, prompt: Prompt, completion: Completion) -> SampleScores: ...

    async def score_group(
        self,
        prompt: Prompt,
        completions: Sequence[Completion],
        sample_scores: Sequence[SampleScores],
    ) -> tuple[Score, ...]: ...


class ProducerError(RuntimeError):
    """The producer thread failed; the cause carries its traceback."""


class GroupStream:
    """The groups of one batch in order of completion; iterating blocks until the next one is there.

    Consumes: groups from the queue. Waits for: the next finished group. Is unblocked by: the
    producer thread. Produces: every group of the batch exactly once, then stops.
    Raises ``ProducerError`` if the producer failed.
    """

    def __init__(
        self, num_groups: int, take: Callable[[bool], RolloutGroup | None], cancel: Callable
    ) -> None:
        self._remaining = num_groups
        self._take = take
        self._cancel = cancel
        self._held: deque[RolloutGroup] = deque()  # taken from the queue, not handed out yet
        self.wait_s = 0.0  # time the consumer was blocked
        self.first_group_wait_s: float | None = None

    def __iter__(self) -> Iterator[RolloutGroup]:
        while (group := self._next(block=True)) is not None:
            yield group

    def take_ready(self, max_tokens: int) -> list[RolloutGroup]:
        """Waits for one group, then adds those ready now, within ``max_tokens`` packed tokens.

        Empty when the batch is complete. The first group is returned whatever its size.
        """
        first = self._next(block=True)
        if first is None:
            return []
        groups, tokens = [first], packed_tokens(first)
        while (group := self._next(block=False)) is not None:
            tokens += packed_tokens(group)
            if tokens > max_tokens:
                self._held.append(group)
                break
            groups.append(group)
        return groups

    def complete(self) -> None:
        """Waits for the whole batch (``mode: sync``); from then on nothing blocks."""
        self._held.extend(list(self))
        self.first_group_wait_s = self.wait_s

    def close(self) -> None:
        """Gives up the rest of the batch: its requests are cancelled."""
        self._remaining = 0
        self._held.clear()
        self._cancel()

    def _next(self, block: bool) -> RolloutGroup | None:
        if self._held:
            return self._held.popleft()
        if self._remaining == 0:
            return None
        start = time.monotonic()
        taken = self._take(block)
        self.wait_s += time.monotonic() - start
        if taken is not None:
            self._remaining -= 1
            if self.first_group_wait_s is None:
                self.first_group_wait_s = self.wait_s
        return taken


class RolloutGenerator:
    """Turns a batch of prompts into a stream of finished groups, in the background.

    Args:
        thread: the loop on which requests run.
        generate: one response for (prompt, sample index, policy version).
        scorer: scores responses as they return and groups when complete.
        num_generations: G, responses per prompt.
        queue_size: finished groups that may wait for the consumer.
        record: receives the events ``batch_dispatched``, ``response_scored``, ``group_ready``.
    """

    def __init__(
        self,
        thread: LoopThread,
        generate: Generate,
        scorer: Scorer,
        *,
        num_generations: int,
        queue_size: int = 64,
        record: Record = ignore,
    ) -> None:
        self._thread = thread
        self._generate = generate
        self._scorer = scorer
        self._num_generations = num_generations
        self._queue_size = queue_size
        self._record = record

    def produce(self, prompts: Sequence[Prompt], version: str | None) -> GroupStream:
        """Starts the batch and returns at once. Prompts are dispatched in the order given."""
        ready: queue.SimpleQueue[RolloutGroup | BaseException] = queue.SimpleQueue()
        free_places = asyncio.Semaphore(self._queue_size)
        batch = self._thread.submit(self._produce(prompts, version, ready, free_places))

        def take(block: bool) -> RolloutGroup | None:
            try:
                item = ready.get(block)
            except queue.Empty:
                return None
            if isinstance(item, BaseException):
                raise ProducerError(f"rollout production failed: {item}") from item
            self._thread.loop.call_soon_threadsafe(free_places.release)
            return item

        return GroupStream(len(prompts), take, batch.cancel)

    async def _produce(
        self,
        prompts: Sequence[Prompt],
        version: str | None,
        ready: queue.SimpleQueue[RolloutGroup | BaseException],
        free_places: asyncio.Semaphore,
    ) -> None:
        self._record("batch_dispatched", version=version, num_prompts=len(prompts))

        async def produce_group(prompt: Prompt) -> None:
            group = await self._group(prompt, version)
            await free_places.acquire()
            self._record("group_ready", epoch=prompt.epoch, index=prompt.index)
            ready.put(group)

        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt in prompts:
                    tasks.create_task(produce_group(prompt))
        except BaseExceptionGroup as errors:
            ready.put(_first_leaf(errors))
        except BaseException as error:
            ready.put(error)  # cancelled: whoever still waits must wake up
            raise

    async def _group(self, prompt: Prompt, version: str | None) -> RolloutGroup:
        dispatched_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            samples = [
                tasks.create_task(self._sample(prompt, sample, version))
                for sample in range(self._num_generations)
            ]
        completions = tuple(task.result()[0] for task in samples)
        sample_scores = [task.result()[1] for task in samples]
        scores = await self._scorer.score_group(prompt, completions, sample_scores)
        return RolloutGroup(
            prompt=prompt,
            completions=completions,
            scores=scores,
            policy_version=version or "",
            dispatched_s=dispatched_s,
            completed_s=time.monotonic(),
        )

    async def _sample(
        self, prompt: Prompt, sample: int, version: str | None
    ) -> tuple[Completion, Any]:
        completion = await self._generate(prompt, sample, version)
        scores = await self._scorer.score_sample(prompt, completion)
        self._record(
            "response_scored",
            epoch=prompt.epoch,
            index=prompt.index,
            sample=sample,
            endpoint=completion.endpoint,
            num_tokens=len(completion.token_ids),
        )
        return completion, scores


def packed_tokens(group: RolloutGroup) -> int:
    """Tokens of a group packed with its prompt once: P + ΣR (paper §4.2)."""
    return len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)


def _first_leaf(error: BaseException) -> BaseException:
    """The first real exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
