"""Producer of finished groups: the temporary data generator of periodic asynchrony (paper §4.3).

Knows neither vLLM, rewards nor files: it is given a ``begin_group`` callable, a ``Scorer`` and,
for groups that outlive the process, a store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from easyrl.dataloaders.producer.draws import Draws, OneRank
from easyrl.dataloaders.producer.group_batch import GroupBatch
from easyrl.dataloaders.producer.group_memory import (
    BlockingMemory,
    GroupMemory,
    GroupStore,
    SpillingMemory,
    StoredGroup,
    UnboundedMemory,
)
from easyrl.dataloaders.producer.group_stream import (
    GroupStream,
    ProducerError,
    ReadyGroup,
    packed_tokens,
)
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.metrics.event_log import Record, ignore
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import Completion, GroupOutcome, Prompt, RolloutGroup, Score

__all__ = [
    "BeginGroup",
    "GroupBatch",
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
# A group's reason to be replaced by the next prompt of the order, or None: it is trained.
Accept = Callable[[RolloutGroup], str | None]
SampleScores = TypeVar("SampleScores")


def accept_all(group: RolloutGroup) -> None:
    """The ``Accept`` of a recipe that rejects nothing."""


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
class _Run:
    """What one call of ``produce_batch`` has to bring about."""

    draws: Draws
    prompt_at: Callable[[int], Prompt]
    version: str | None
    store: GroupStore | None
    accept: Accept
    memory: GroupMemory
    batch: GroupBatch


class RolloutGenerator:
    """Turns prompts into streams of finished groups, in the background.

    Args:
        thread: the loop on which requests run.
        begin_group: for a prompt, a policy version and a priority, a context that is entered when
            it is that group's turn, and gives what makes sample ``i``. Left when the group is
            complete or given up.
        scorer: scores responses as they return and groups when complete.
        num_generations: G, responses per prompt.
        queue_size: finished groups that may wait in memory for the trainer. What is held back, for
            its order or its optimizer step to be known or by the consumer (``complete``,
            ``drain``), counts only where there is a store.
        excluded_by: errors of a sample that are its prompt's fault (it is too long): the group has
            no completions then, and the reason in ``excluded``.
        in_prompt_order: hand groups out in the order of their prompts, not in that of completion.
        record: receives the events ``batch_dispatched``, ``response_scored``, ``group_ready``,
            ``batch_generated`` when all drawn positions of all ranks are decided, and
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
        self, prompts: Sequence[Prompt], version: str | None, *, store: GroupStore | None = None
    ) -> GroupStream:
        """Starts the generation of ``prompts`` and returns at once; every group is handed out.

        What ``store`` has of them is ready from the start; only the others are asked for, and
        stored as they finish, before they are handed out. Raises what ``store.find`` raises.
        """
        membership = BatchMembership(max(len(prompts), 1), num_left=len(prompts))
        recovered = []
        for position, prompt in enumerate(prompts):
            stored = None if store is None else store.find(prompt)
            if stored is not None:
                membership.decide(position, True)
                recovered.append((position, stored))
        batch = self.produce_batch(
            Draws(membership, OneRank()),
            prompts.__getitem__,
            version,
            store=store,
            recovered=recovered,
            hands_out_refused=True,
        )
        return batch.streams[0]

    def produce_batch(
        self,
        draws: Draws,
        prompt_at: Callable[[int], Prompt],
        version: str | None,
        *,
        num_updates: int = 1,
        store: GroupStore | None = None,
        recovered: Sequence[tuple[int, StoredGroup]] = (),
        accept: Accept = accept_all,
        hands_out_refused: bool = False,
    ) -> GroupBatch:
        """Starts a batch whose members are found while it runs; returns at once.

        Args:
            draws: the positions to generate.
            prompt_at: the prompt at a position of the batch.
            store: keeps each group before it counts; asked for each prompt before it is generated.
            recovered: positions that ``draws`` counts as decided already, with this rank's groups.
            accept: a group's reason to be replaced by the next prompt, or None.
            hands_out_refused: excluded groups too go to the streams.
        """
        memory = self._memory(store, holds_back=self._in_prompt_order or num_updates > 1)
        batch = GroupBatch(
            self._num_generations,
            num_updates,
            memory,
            in_prompt_order=self._in_prompt_order,
            hands_out_refused=hands_out_refused,
        )
        self._record("batch_dispatched", version=version, num_recovered=len(recovered))
        for position, stored in recovered:
            prompt = prompt_at(position)
            self._note_recovered(prompt)
            batch.add_stored(position, prompt, stored)
        run = _Run(draws, prompt_at, version, store, accept, memory, batch)
        draws.on_change = lambda: batch.release(draws)
        batch.release(draws)  # what is recovered is ready from the start
        batch.producing = self._thread.submit(self._produce(run))
        return batch

    def _memory(self, store: GroupStore | None, *, holds_back: bool) -> GroupMemory:
        if store is not None:
            return SpillingMemory(self._queue_size, store, self._disk)
        if holds_back:
            return UnboundedMemory()
        return BlockingMemory(self._queue_size, self._thread.loop)

    async def _produce(self, run: _Run) -> None:
        batch = run.batch
        try:
            async with asyncio.TaskGroup() as tasks:
                async for position in run.draws:
                    tasks.create_task(self._draw(position, run))
            self._record("batch_generated", version=run.version)
            await run.memory.finish()
            batch.release(run.draws)
        except BaseExceptionGroup as errors:
            failure = _first_leaf(errors)
            run.draws.give_up(str(failure))
            batch.fail(failure)
        except BaseException as error:
            batch.fail(error)  # cancelled: whoever still waits must wake up
            raise

    async def _draw(self, position: int, run: _Run) -> None:
        """One prompt, from its dispatch to its outcome."""
        prompt = run.prompt_at(position)
        stored = None if run.store is None else run.store.find(prompt)
        if stored is not None:  # finished before, and not needed until now
            self._note_recovered(prompt)
            run.batch.add_stored(position, prompt, stored)
            run.draws.decide(position, not stored.refused)
            return
        try:
            group = await self._group(position, prompt, run)
            if group.excluded is None and (reason := run.accept(group)) is not None:
                group = replace(group, rejected=reason or "no reason given")
            hands_out = not group.refused or run.batch.hands_out_refused
            if not hands_out:
                group = await run.memory.put_away(group)
                run.batch.refused.append(GroupOutcome.of(group))
            else:
                kept = await run.memory.keep(group)
                run.batch.add(position, ReadyGroup(prompt.key, packed_tokens(group), kept))
        finally:
            run.batch.close_open_group(prompt)
        self._record("group_ready", epoch=prompt.epoch, index=prompt.index)
        run.draws.decide(position, hands_out)

    def _note_recovered(self, prompt: Prompt) -> None:
        self._record("group_recovered", epoch=prompt.epoch, index=prompt.index)

    async def _group(self, position: int, prompt: Prompt, run: _Run) -> RolloutGroup:
        dispatched_s = time.monotonic()
        completions: tuple[Completion, ...] = ()
        scores: tuple[Score, ...] = ()
        excluded: str | None = None
        try:
            priority = run.draws.membership.expected_update_of(position)
            async with self._begin_group(prompt, run.version, priority) as sample:
                dispatched_s = time.monotonic()
                completions, sample_scores = await self._samples(position, prompt, sample, run)
            scores = await self._scorer.score_group(prompt, completions, sample_scores)
        except self._excluded_by as error:
            log.warning("prompt %d is excluded: %s", prompt.index, error)
            excluded = str(error)
        return RolloutGroup(
            prompt=prompt,
            completions=completions,
            scores=scores,
            policy_version=run.version or "",
            position=position,
            dispatched_s=dispatched_s,
            completed_s=time.monotonic(),
            excluded=excluded,
        )

    async def _samples(
        self, position: int, prompt: Prompt, sample: Sample, run: _Run
    ) -> tuple[tuple[Completion, ...], list[Any]]:
        """All responses and what was scored of each. Raises the first error that ended one."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [
                    tasks.create_task(self._sample(position, prompt, sample, number, run))
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
        self, position: int, prompt: Prompt, sample: Sample, number: int, run: _Run
    ) -> tuple[Completion, Any]:
        completion = await sample(number)
        run.batch.add_sample(position, prompt, number, completion, run.draws)
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
