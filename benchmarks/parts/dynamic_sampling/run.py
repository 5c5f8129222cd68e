"""A batch made by the real producers, with generation and training that sleep instead of computing.

Each data-parallel rank is a pair of threads: its producer's loop and its trainer. Ranks share their
decisions through a ``TCPStore``, as those of a run do, and the endpoint, which has a thread too.
"""

from __future__ import annotations

import asyncio
import heapq
import queue
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from torch.distributed import TCPStore

from benchmarks.parts.dynamic_sampling.load import Load
from benchmarks.parts.one_reward import OneReward
from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.group_stream import GroupStream
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.open_batch import OpenBatch
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator, Sample
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.rank_coordination import SharedBatch
from easyrl.schema import Completion, Prompt, RolloutGroup, VersionSpan

VERSION = "benchmark:0:0"
_TOKEN = Completion(
    token_ids=np.zeros(1, dtype=np.int32),
    logprobs=np.zeros(1, dtype=np.float32),
    finish_reason="stop",
    version_spans=(VersionSpan(VERSION, 0, 1),),
    endpoint="http://sleeping",
    loss_mask=np.ones(1, dtype=bool),
)


@dataclass(frozen=True)
class RunBatch:
    """What became of a batch."""

    batch_s: float  # until the slowest rank has trained its last group
    generation_s: float  # until the last group is finished on all ranks
    trained: list[int]  # positions, of all ranks


class SleepingEndpoint:
    """Answers ``num_slots`` requests at a time; those that wait in the order of their prompts."""

    def __init__(self, load: Load, thread: LoopThread) -> None:
        self._load = load
        self._thread = thread
        self._num_free = load.num_slots
        self._waiting: list[tuple[int, int, asyncio.Event]] = []

    async def generate(self, position: int, sample: int) -> Completion:
        """From any loop."""
        return await asyncio.wrap_future(self._thread.submit(self._answer(position, sample)))

    async def _answer(self, position: int, sample: int) -> Completion:
        if self._num_free:
            self._num_free -= 1
        else:
            turn = asyncio.Event()
            heapq.heappush(self._waiting, (position, sample, turn))
            await turn.wait()
        await asyncio.sleep(self._load.seconds(position, sample))
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._num_free += 1
        return _TOKEN


class _Rank:
    """One data-parallel rank: its producer, its trainer."""

    def __init__(
        self,
        load: Load,
        rank: int,
        endpoint: SleepingEndpoint,
        store: TCPStore | None,
        thread: LoopThread,
    ) -> None:
        self._load = load
        self._rank = rank
        self._endpoint = endpoint
        self._store = store
        self._producer = RolloutGenerator(
            thread,
            self._begin_group,
            OneReward(),
            num_generations=load.num_samples,
            queue_size=load.num_groups,
        )
        self._last_group_s = 0.0
        self._num_drawn = 0  # by all ranks

    def run(self, train_s: float, *, overlapped: bool) -> tuple[float, float, list[int]]:
        """Trains the batch: end of training and of generation (``time.monotonic``), and what."""
        trained = []
        with ThreadPoolExecutor(1) as producing:
            streams: queue.SimpleQueue[GroupStream | BaseException | None] = queue.SimpleQueue()
            produced = producing.submit(self._produce, streams, overlapped)
            while (stream := streams.get()) is not None:
                for group in stream:
                    time.sleep(train_s)
                    trained.append(group.prompt.index)
            produced.result()
        return time.monotonic(), self._last_group_s, trained

    def _produce(self, streams: queue.SimpleQueue, overlapped: bool) -> None:
        """Starts all draws of the batch, and waits for them."""
        try:
            for batch in self._batches(overlapped):
                streams.put(batch.updates[0])
                assert batch.producing is not None
                batch.producing.result()
                self._last_group_s = time.monotonic()
        finally:
            streams.put(None)

    def _batches(self, overlapped: bool) -> Iterator[OpenBatch]:
        """One; or as many as it takes, each of what the ones before have left to draw."""
        missing = self._load.num_groups
        while missing:
            first = self._num_drawn
            limit = None if overlapped else missing
            membership = BatchMembership(missing, num_left=limit)
            yield self._producer.produce_batch(
                self._draws(membership, first),
                lambda position, first=first: _prompt(first + position),  # type: ignore[misc]
                VERSION,
                accept=self._reason_to_reject,
            )
            self._num_drawn += membership.bound
            missing -= membership.num_accepted

    def _draws(self, membership: BatchMembership, first: int) -> Draws:
        num_ranks = self._load.num_ranks
        return Draws(
            membership,
            SharedBatch(self._store, f"{first}", self._rank) if self._store else None,
            # position p of the batch, not of this draw, belongs to rank p mod n
            fixed=((self._rank - first) % num_ranks, num_ranks),
        )

    def _reason_to_reject(self, group: RolloutGroup) -> str | None:
        return None if self._load.accepts(group.prompt.index) else "as the load says"

    @asynccontextmanager
    async def _begin_group(
        self, prompt: Prompt, version: str | None, priority: int
    ) -> AsyncIterator[Sample]:
        yield lambda sample: self._endpoint.generate(prompt.index, sample)


def run_batch(load: Load, train_s: float, *, overlapped: bool) -> RunBatch:
    """One batch on all ranks.

    Args:
        train_s: that a group takes to train.
        overlapped: rejected groups are replaced while the batch is generated; else drawn once all
            groups before are finished. Training goes on meanwhile in both.
    """
    with ExitStack() as opened:
        endpoint = SleepingEndpoint(load, opened.enter_context(LoopThread("endpoint")))
        ranks = [
            _Rank(load, rank, endpoint, store, opened.enter_context(LoopThread()))
            for rank, store in enumerate(_stores(load.num_ranks))
        ]
        threads = opened.enter_context(ThreadPoolExecutor(load.num_ranks))
        start_s = time.monotonic()
        running = [threads.submit(rank.run, train_s, overlapped=overlapped) for rank in ranks]
        ends, generated, trained = zip(*[future.result() for future in running], strict=True)
    positions = [position for of_rank in trained for position in of_rank]
    return RunBatch(max(*ends, 0.0) - start_s, max(*generated, 0.0) - start_s, positions)


def _stores(num_ranks: int) -> list[TCPStore | None]:
    """Each rank's connection to a store of theirs; none where a rank is alone."""
    if num_ranks == 1:
        return [None]
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(num_ranks - 1)]
    return [first, *others]


def _prompt(position: int) -> Prompt:
    return Prompt(position, np.zeros(1, dtype=np.int32), text="", answer=None)
