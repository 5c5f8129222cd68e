"""Two ranks that fill and train one batch: real producers and journals, endpoints and training
that sleep.

Each rank is a pair of threads, its producer's loop and its trainer, with a connection of its own to
the ``TCPStore`` that ranks of a run share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch.distributed import TCPStore

from benchmarks.parts.balance.idle import Trained
from benchmarks.parts.balance.workload import Load, cost_of
from benchmarks.parts.one_reward import OneReward
from easyrl.build.accumulation import ROWS_PER_DRAIN
from easyrl.dataloaders.producer.balance import Balance
from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.group_stream import packed_tokens
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.open_batch import OpenBatch
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator, Sample
from easyrl.ledger.journal.batch import Journal, Production
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.machine import free_port
from easyrl.runtime.rank_coordination import SharedBatch
from easyrl.schema import (
    Completion,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    ServedWeights,
    VersionSpan,
)

NUM_RANKS = 2
ROW_TOKENS = 8192
# Position p is trained by rank p mod 2; by the rank that claimed it; by the one with least to do.
Assignment = Literal["strides", "claims", "handover"]


@dataclass(frozen=True)
class Outcome:
    """A trained batch.

    Attributes:
        bytes_moved: between the ranks' heads, as they were sent.
    """

    ranks: list[Trained]
    groups_moved: int
    bytes_moved: int


def train_batch(load: Load, assignment: Assignment, folder: Path) -> Outcome:
    """On two ranks; ``folder`` is the batch's journal."""
    with ExitStack() as opened:
        stores = _stores()
        threads = [opened.enter_context(LoopThread()) for _ in range(NUM_RANKS)]
        start_s = time.monotonic() + 0.1
        ranks = [
            _Rank(load, rank, assignment, stores[rank], thread, folder, start_s)
            for rank, thread in enumerate(threads)
        ]
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            trained = list(pool.map(_Rank.train, ranks))
    moved = [rank.moved for rank in ranks]
    return Outcome(trained, sum(map(len, moved)), sum(map(sum, moved)))


def _stores() -> list[TCPStore]:
    port = free_port()
    return [
        TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        for rank in range(NUM_RANKS)
    ]


class _Rank:
    """One data-parallel rank."""

    def __init__(
        self,
        load: Load,
        rank: int,
        assignment: Assignment,
        store: TCPStore,
        thread: LoopThread,
        folder: Path,
        start_s: float,
    ) -> None:
        self._load = load
        self._rank = rank
        self._assignment = assignment
        self._shared = SharedBatch(store, "batch", rank, NUM_RANKS)
        self._start_s = start_s
        self._producer = RolloutGenerator(
            thread, self._begin_group, OneReward(), num_generations=len(load.lengths[0]) - 1
        )
        self._served = ServedWeights(PolicyVersion("benchmark", 0, 0), "0" * 64)
        self._journal = Journal(folder, 0, rank, "never").open_batch(self._served)
        self.moved: list[int] = []  # bytes, of each group that another rank has drawn

    def train(self) -> Trained:
        rows: list[tuple[float, float]] = []
        begun: dict[int, float] = {}
        with self._batch() as batch:
            (stream,) = batch.updates
            while groups := stream.drain_ready(ROWS_PER_DRAIN * ROW_TOKENS):
                self.moved += [g.bytes_moved for g in groups if g.drawn_by is not None]
                for row in _rows(groups):
                    begin_s = self._now_s()
                    begun |= {group.position: begin_s for group in row}
                    time.sleep(sum(self._load.train_s[group.position] for group in row))
                    rows.append((begin_s, self._now_s()))
                    stream.note_trained(sum(map(packed_tokens, row)))
        return Trained(rows, begun)

    @contextmanager
    def _batch(self) -> Iterator[OpenBatch]:
        """Until it is trained."""
        num_groups, has_strides = len(self._load.lengths), self._assignment == "strides"
        batch = self._producer.produce_batch(
            Draws(
                BatchMembership(num_groups),
                self._shared,
                fixed=(self._rank, NUM_RANKS) if has_strides else None,
                room=-(-num_groups // NUM_RANKS),
                balance=Balance(self._shared, self._rank, cost_of)
                if self._assignment == "handover"
                else None,
            ),
            self._prompt,
            str(self._served.version),
            store=Production(self._journal),
        )
        try:
            yield batch
        finally:
            batch.close()
            self._journal.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _prompt(self, position: int) -> Prompt:
        token_ids = np.arange(self._load.lengths[position][0], dtype=np.int32)
        return Prompt(position, token_ids, "", None)

    @asynccontextmanager
    async def _begin_group(
        self, prompt: Prompt, version: str | None, priority: int
    ) -> AsyncIterator[Sample]:
        lengths, arrival_s = self._load.lengths[prompt.index], self._load.arrivals_s[prompt.index]
        longest = max(lengths[1:])

        async def sample(number: int) -> Completion:
            length = lengths[1 + number]
            await asyncio.sleep(arrival_s * length / longest - self._now_s())
            return _completion(length, str(version))

        yield sample


def _rows(groups: Sequence[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
    """As many as fit into a row, in their order; a larger one has a row of its own."""
    row: list[RolloutGroup] = []
    for group in groups:
        if row and sum(map(packed_tokens, [*row, group])) > ROW_TOKENS:
            yield row
            row = []
        row.append(group)
    if row:
        yield row


def _completion(length: int, version: str) -> Completion:
    return Completion(
        token_ids=np.zeros(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(version, 0, length),),
        endpoint="http://sleeping",
        loss_mask=np.ones(length, dtype=bool),
    )
