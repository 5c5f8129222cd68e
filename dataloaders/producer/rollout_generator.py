"""Producer of finished groups: the temporary data generator of periodic asynchrony (paper §4.3)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.group_stream import GroupStream, StoredGroup
from easyrl.dataloaders.producer.group_writer import GroupWriter
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.open_batch import OpenBatch
from easyrl.metrics.event_log import Record, ignore
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.printable import printable
from easyrl.schema import Completion, Exclusion, ExclusionKind, Key, Prompt, RolloutGroup, Score
from easyrl.timeline.spans import QUEUED, AddSpan, ignore_span

log = logging.getLogger(__name__)

Sample = Callable[[int], Awaitable[Completion]]  # index of the sample → its response
# prompt, version, priority → entered when it is the group's turn; inside, its samples may be asked
# for. Groups of a smaller priority go first.
BeginGroup = Callable[[Prompt, str | None, int], AbstractAsyncContextManager[Sample]]
# A group's reason to be replaced by the next prompt of the order, or None: it is trained.
Accept = Callable[[RolloutGroup], str | None]


class Scorer(Protocol):
    """Scores each response as it returns, and the group when it is complete."""

    async def score_sample(self, prompt: Prompt, completion: Completion) -> Any: ...
    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion], sample_scores: Sequence[Any]
    ) -> tuple[Score, ...]:
        """``sample_scores``: what ``score_sample`` has said of each."""


class GroupStore(Protocol):
    """Keeps finished groups over the end of the process. ``add`` and ``flush`` do disk I/O."""

    def find(self, prompt: Prompt) -> StoredGroup | None:
        """The prompt's group, if it was finished before and may be trained now."""

    def add(self, group: RolloutGroup) -> tuple[RolloutGroup, StoredGroup]:
        """Stores a finished group; returns it with ``digest`` set, and how to read it back."""

    def give(self, stored: StoredGroup) -> bytes:
        """A group that it stores, for another rank's ``receive``."""

    def receive(self, payload: bytes, prompt: Prompt) -> StoredGroup:
        """A group that another rank stores and this one is to train, from now on for good."""

    def flush(self) -> None:
        """Nothing more comes for now: what takes long may be done while the trainer is busy."""


class _Run(NamedTuple):
    """What one call of ``produce_batch`` has to bring about."""

    draws: Draws
    prompt_at: Callable[[int], Prompt]
    version: str | None
    store: GroupStore | None
    writer: GroupWriter | None  # to the store
    accept: Accept
    batch: OpenBatch


@dataclass(frozen=True)
class RolloutGenerator:
    """Turns prompts into streams of finished groups, in the background.

    Records ``batch_dispatched``, ``response_scored``, ``group_ready``, ``group_handed_over`` where
    another rank is to train one, ``batch_generated`` when all drawn positions of all ranks are
    decided, and ``group_recovered`` for each group of a store.
    """

    thread: LoopThread  # its loop runs the requests
    begin_group: BeginGroup  # its context is left when the group is complete or given up
    scorer: Scorer
    _: KW_ONLY
    num_generations: int  # G, responses per prompt
    # finished groups that may wait in memory where there is a store, which has the others
    queue_size: int = 64
    # errors of a sample that are its prompt's fault (it is too long), the special before the
    # general: the group has no completions then, and what was said in ``excluded``
    excluded_by: Mapping[type[Exception], ExclusionKind] = field(default_factory=dict)
    in_prompt_order: bool = False  # groups are handed out so, not in order of completion
    record: Record = ignore
    span: AddSpan = ignore_span  # told of each group and reward
    # told, as a batch begins, how many of its groups are there already
    on_begin: Callable[[int], object] = lambda num_recovered: None
    # held while a store is written, so that one thread at a time is busy with it
    _disk: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def produce(self, prompts: Sequence[Prompt], version: str | None) -> GroupStream:
        """Starts the generation of ``prompts`` and returns at once; every group is handed out."""
        membership = BatchMembership(max(len(prompts), 1), num_left=len(prompts))
        batch = self.produce_batch(
            Draws(membership), prompts.__getitem__, version, hands_out_refused=True
        )
        return batch.updates[0]

    def produce_batch(
        self,
        draws: Draws,
        prompt_at: Callable[[int], Prompt],
        version: str | None,
        *,
        store: GroupStore | None = None,
        recovered: Sequence[tuple[int, StoredGroup]] = (),
        accept: Accept = lambda group: None,
        hands_out_refused: bool = False,
    ) -> OpenBatch:
        """Starts a batch whose members are found while it runs; returns at once.

        Args:
            draws: the positions to generate.
            prompt_at: the prompt at a position of the batch.
            store: keeps each group before it counts; asked for each prompt before it is generated.
            recovered: positions that ``draws`` counts as decided already, with this rank's groups.
            hands_out_refused: excluded groups too go to the streams.
        """
        batch = OpenBatch(
            draws,
            self.num_generations,
            self.queue_size,
            in_prompt_order=self.in_prompt_order,
            hands_out_refused=hands_out_refused,
        )
        for stream in batch.updates:
            stream.on_handed_out = self._handed_out
        self.on_begin(len(recovered))
        self.record("batch_dispatched", version=version, num_recovered=len(recovered))
        for position, stored in recovered:
            self._add_stored(batch, position, prompt_at(position), stored)
        batch.release()  # what is recovered is ready from the start
        writer = None if store is None else GroupWriter(store.add, self._disk)
        run = _Run(draws, prompt_at, version, store, writer, accept, batch)
        draws.on_handed_over = partial(self._receive, run)
        batch.producing = self.thread.submit(self._produce(run))
        return batch

    def _handed_out(self, key: Key, since_s: float, now_s: float) -> None:
        """On the consumer's thread."""
        self.span(QUEUED, since_s, now_s, epoch=key[0], index=key[1])

    async def _produce(self, run: _Run) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                async for position in run.draws:
                    tasks.create_task(self._draw(position, run))
            self.record("batch_generated", version=run.version)
            if run.store is not None:
                async with self._disk:
                    await asyncio.to_thread(run.store.flush)
            run.batch.release()
        except BaseExceptionGroup as errors:
            failure = _first_leaf(errors)
            run.draws.announce("failure", str(failure))
            run.batch.fail(failure)
        except BaseException as error:
            run.batch.fail(error)  # cancelled: whoever still waits must wake up
            raise

    async def _draw(self, position: int, run: _Run) -> None:
        """One prompt, from its dispatch to its outcome."""
        prompt = run.prompt_at(position)
        stored = None if run.store is None else run.store.find(prompt)
        if stored is not None:  # finished before, and not needed until now
            hands_out = self._add_stored(run.batch, position, prompt, stored)
            run.draws.decide(position, hands_out, stored.exclusion)
            return
        try:
            group = await self._group(position, prompt, run)
            if group.excluded is None and (reason := run.accept(group)) is not None:
                group = replace(group, rejected=reason or "no reason given")
            if run.writer is not None:
                group, stored = await run.writer.add(group)  # the loop goes on meanwhile
            self.record("group_ready", epoch=prompt.epoch, index=prompt.index)
            trains = await self._hand_over(position, group, stored, run)
            hands_out = trains is not None or run.batch.add(position, group, stored)
        finally:
            run.batch.close_open_group(position, prompt)
        run.draws.decide(position, hands_out, group.excluded, trains)

    async def _hand_over(
        self, position: int, group: RolloutGroup, stored: StoredGroup | None, run: _Run
    ) -> int | None:
        """The other rank that is to train ``group`` and can fetch it now; None: this one is."""
        balance, store = run.draws.balance, run.store
        if balance is None or store is None or stored is None or group.refused is not None:
            return None
        cost = run.batch.cost_of(stored.lengths)
        rank = await asyncio.to_thread(balance.choose, cost)
        if rank == balance.rank:
            return None
        payload = await asyncio.to_thread(store.give, stored)
        await asyncio.to_thread(balance.shared.put_group, position, payload)
        epoch, index = group.prompt.key
        self.record(
            "group_handed_over", epoch=epoch, index=index, rank=rank, num_bytes=len(payload)
        )
        return rank

    async def _receive(self, run: _Run, position: int) -> None:
        """The group of ``position``, which another rank has drawn, is this one's."""
        assert run.draws.balance is not None and run.store is not None
        shared, prompt = run.draws.balance.shared, run.prompt_at(position)
        payload = await asyncio.to_thread(shared.take_group, position)
        async with self._disk:
            stored = await asyncio.to_thread(run.store.receive, payload, prompt)
        run.batch.add_handed_over(position, prompt, stored)

    def _add_stored(
        self, batch: OpenBatch, position: int, prompt: Prompt, stored: StoredGroup
    ) -> bool:
        self.record("group_recovered", epoch=prompt.epoch, index=prompt.index)
        return batch.add_stored(position, prompt, stored)

    async def _group(self, position: int, prompt: Prompt, run: _Run) -> RolloutGroup:
        dispatched_s = time.monotonic()
        completions: tuple[Completion, ...] = ()
        scores: tuple[Score, ...] = ()
        excluded: Exclusion | None = None
        try:
            priority = run.batch.membership.expected_update_of(position)
            async with self.begin_group(prompt, run.version, priority) as sample:
                dispatched_s = time.monotonic()
                completions, sample_scores = await self._samples(
                    position, prompt, sample, run.batch
                )
            scored_s = time.monotonic()
            scores = await self.scorer.score_group(prompt, completions, sample_scores)
            now_s = time.monotonic()
            self.span("group reward", scored_s, now_s, index=prompt.index)
            self.span("group", dispatched_s, now_s, epoch=prompt.epoch, index=prompt.index)
        except tuple(self.excluded_by) as error:
            kinds = (kind for of, kind in self.excluded_by.items() if isinstance(error, of))
            excluded = Exclusion(next(kinds), printable(str(error)) or "no reason given")
            where = f" ({prompt.location})" if prompt.location else ""
            log.warning("prompt %d%s is excluded: %s", prompt.index, where, excluded.reason)
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
        self, position: int, prompt: Prompt, sample: Sample, batch: OpenBatch
    ) -> tuple[tuple[Completion, ...], tuple[Any, ...]]:
        """All responses and what was scored of each. Raises the first error that ended one."""

        async def finish(number: int) -> tuple[Completion, Any]:
            completion = await sample(number)
            batch.add_sample(position, prompt, number, completion)
            scored_s = time.monotonic()
            scores = await self.scorer.score_sample(prompt, completion)
            self.span("reward", scored_s, time.monotonic(), index=prompt.index, sample=number)
            self.record(
                "response_scored",
                epoch=prompt.epoch,
                index=prompt.index,
                sample=number,
                endpoint=completion.endpoint,
                num_tokens=len(completion.sampled_ids),
            )
            return completion, scores

        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [
                    tasks.create_task(finish(number)) for number in range(self.num_generations)
                ]
        except ExceptionGroup as errors:
            # an error of the run goes before one of the prompt
            _, others = errors.split(tuple(self.excluded_by))
            failure = _first_leaf(others or errors)
        if failure is not None:
            raise failure  # with its own cause, not in front of the group
        completions, scores = zip(*(task.result() for task in samples), strict=True)
        return completions, scores


def _first_leaf(error: BaseException) -> BaseException:
    """The first real exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
