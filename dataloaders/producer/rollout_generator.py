"""The temporary data generator: a producer of finished groups (periodic asynchrony, paper §4.3).

Knows neither vLLM, rewards nor files: it is given a ``begin_group`` callable, a ``Scorer`` and,
for groups that outlive the process, a store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from easyrl.dataloaders.producer.group_memory import (
    BlockingMemory,
    GroupMemory,
    GroupStore,
    SpillingMemory,
    StoredGroup,
)
from easyrl.dataloaders.producer.group_stream import (
    GroupStream,
    ProducerError,
    ReadyGroup,
    ReadyQueue,
    packed_tokens,
)
from easyrl.dataloaders.producer.loop_thread import LoopThread
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.metrics.event_log import Record, ignore
from easyrl.schema import Completion, Prompt, RolloutGroup, Score

__all__ = [
    "BeginGroup",
    "GroupStore",
    "GroupStream",
    "ProducerError",
    "RolloutGenerator",
    "Sample",
    "Scorer",
    "StoredGroup",
    "packed_tokens",
]

log = logging.getLogger(__name__)

Sample = Callable[[int], Awaitable[Completion]]  # index of the sample → its response
# prompt, version, priority → entered when it is the group's turn; inside, its samples may be asked
# for. Groups of a smaller priority go first.
BeginGroup = Callable[[Prompt, str | None, int], AbstractAsyncContextManager[Sample]]
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


@dataclass(frozen=True)
class _Batch:
    """What one call of ``produce`` has to bring about."""

    prompts: Sequence[tuple[int, Prompt]]  # the missing ones, with their positions
    version: str | None
    priority: int
    ready: ReadyQueue
    memory: GroupMemory
    open_samples: OpenSamples


class RolloutGenerator:
    """Turns a batch of prompts into a stream of finished groups, in the background.

    Args:
        thread: the loop on which requests run.
        begin_group: for a prompt, a policy version and a priority, a context that is entered when
            it is that group's turn, and gives what makes sample ``i``. Left when the group is
            complete or given up.
        scorer: scores responses as they return and groups when complete.
        num_generations: G, responses per prompt.
        queue_size: finished groups of a stream that may wait in memory. What the consumer has
            taken off the queue and holds back (``complete``, ``in_prompt_order``) counts only
            where there is a store.
        excluded_by: errors of a sample that are its prompt's fault (it is too long): the group is
            handed on without completions, with the reason in ``excluded``.
        in_prompt_order: hand groups out in the order of their prompts, not in that of completion.
        record: receives the events ``batch_dispatched``, ``response_scored``, ``group_ready``, and
            ``group_recovered`` for each group that a store had.
    """

    def __init__(
        self,
        thread: LoopThread,
        begin_group: BeginGroup,
        scorer: Scorer,
        *,
        num_generations: int,
        queue_size: int = 64,
        excluded_by: tuple[type[Exception], ...] = (),
        in_prompt_order: bool = False,
        record: Record = ignore,
    ) -> None:
        self._thread = thread
        self._begin_group = begin_group
        self._scorer = scorer
        self._num_generations = num_generations
        self._queue_size = queue_size
        self._excluded_by = excluded_by
        self._in_prompt_order = in_prompt_order
        self._record = record
        self._disk = asyncio.Lock()

    def produce(
        self,
        prompts: Sequence[Prompt],
        version: str | None,
        *,
        store: GroupStore | None = None,
        priority: int = 0,
    ) -> GroupStream:
        """Starts the batch and returns at once. All groups ask for their turn, in this order.

        What ``store`` has of them is ready from the start; only the others are asked for, and
        stored as they finish, before they are handed out. Raises what ``store.find`` raises.
        """
        missing: list[tuple[int, Prompt]] = []
        recovered: list[Prompt] = []
        ready = ReadyQueue()
        for position, prompt in enumerate(prompts):
            stored = None if store is None else store.find(prompt)
            if stored is None:
                missing.append((position, prompt))
            else:
                recovered.append(prompt)
                ready.put_group(ReadyGroup(position, stored.num_tokens, stored))
        self._record(
            "batch_dispatched",
            version=version,
            num_prompts=len(prompts),
            num_recovered=len(recovered),
        )
        for prompt in recovered:
            self._record("group_recovered", epoch=prompt.epoch, index=prompt.index)
        memory = self._memory(store)
        open_samples = OpenSamples(self._num_generations, wake=lambda: ready.put(None))
        batch = self._thread.submit(
            self._produce(_Batch(missing, version, priority, ready, memory, open_samples))
        )
        return GroupStream(
            len(prompts),
            ready,
            memory,
            batch.cancel,
            open_samples=open_samples,
            recovered=frozenset(prompt.key for prompt in recovered),
            in_prompt_order=self._in_prompt_order,
        )

    def _memory(self, store: GroupStore | None) -> GroupMemory:
        if store is None:
            return BlockingMemory(self._queue_size, self._thread.loop)
        return SpillingMemory(self._queue_size, store, self._disk)

    async def _produce(self, batch: _Batch) -> None:
        async def produce_group(position: int, prompt: Prompt) -> None:
            try:
                group = await self._group(prompt, batch)
                kept = await batch.memory.keep(group)
            finally:
                batch.open_samples.close_group(prompt)
            self._record("group_ready", epoch=prompt.epoch, index=prompt.index)
            batch.ready.put_group(ReadyGroup(position, packed_tokens(group), kept))

        try:
            async with asyncio.TaskGroup() as tasks:
                for position, prompt in batch.prompts:
                    tasks.create_task(produce_group(position, prompt))
            await batch.memory.finish()
        except BaseExceptionGroup as errors:
            batch.ready.put(_first_leaf(errors))
        except BaseException as error:
            batch.ready.put(error)  # cancelled: whoever still waits must wake up
            raise

    async def _group(self, prompt: Prompt, batch: _Batch) -> RolloutGroup:
        dispatched_s = time.monotonic()
        completions: tuple[Completion, ...] = ()
        scores: tuple[Score, ...] = ()
        excluded: str | None = None
        try:
            async with self._begin_group(prompt, batch.version, batch.priority) as sample:
                dispatched_s = time.monotonic()
                completions, sample_scores = await self._samples(prompt, sample, batch.open_samples)
            scores = await self._scorer.score_group(prompt, completions, sample_scores)
        except self._excluded_by as error:
            log.warning("prompt %d is excluded: %s", prompt.index, error)
            excluded = str(error)
        return RolloutGroup(
            prompt=prompt,
            completions=completions,
            scores=scores,
            policy_version=batch.version or "",
            dispatched_s=dispatched_s,
            completed_s=time.monotonic(),
            excluded=excluded,
        )

    async def _samples(
        self, prompt: Prompt, sample: Sample, open_samples: OpenSamples
    ) -> tuple[tuple[Completion, ...], list[Any]]:
        """All responses and what was scored of each. Raises the first error that ended one."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [
                    tasks.create_task(self._sample(prompt, sample, number, open_samples))
                    for number in range(self._num_generations)
                ]
        except ExceptionGroup as errors:
            # an error of the run goes before one of the prompt
            _, others = errors.split(self._excluded_by)
            failure = _first_leaf(others or errors)
        if failure is not None:
            raise failure  # with its own cause, not in front of the group
        results = [task.result() for task in samples]
        return tuple(result[0] for result in results), [result[1] for result in results]

    async def _sample(
        self, prompt: Prompt, sample: Sample, number: int, open_samples: OpenSamples
    ) -> tuple[Completion, Any]:
        completion = await sample(number)
        open_samples.add(prompt, number, completion)
        scores = await self._scorer.score_sample(prompt, completion)
        self._record(
            "response_scored",
            epoch=prompt.epoch,
            index=prompt.index,
            sample=number,
            endpoint=completion.endpoint,
            num_tokens=len(completion.token_ids),
        )
        return completion, scores


def _first_leaf(error: BaseException) -> BaseException:
    """The first real exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
