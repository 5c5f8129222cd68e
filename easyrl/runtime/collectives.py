"""Collective operations of the trainers on small values, over a CPU group and in JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import orjson
import torch
import torch.distributed as dist

from easyrl.config import ConfigError
from easyrl.runtime.gloo_wait import LONGEST_WAIT, wait_with_signals
from easyrl.runtime.rank_store import serve_store
from easyrl.runtime.ranks import Ranks
from easyrl.schema import (
    BatchWithdrawn,
    PeerOutage,
    RewardError,
    StopRequested,
    TooManyExcluded,
)

T = TypeVar("T")

STORE_TIMEOUT = timedelta(seconds=30)
LONGEST_PAUSE_S = 0.01
WORK, FINISHED, FAILED = range(3)  # what a rank has for the next round (docs/architecture.md)


class PeerFailed(RuntimeError):
    """Another rank failed; its own log has the traceback."""


# What ends a batch on all ranks, by what goes first.
_PEERS: tuple[type[Exception], ...] = (
    StopRequested,
    RewardError,  # of which other ranks hear as of an outage
    PeerOutage,
    BatchWithdrawn,
    TooManyExcluded,
)


def _kind(error: Exception) -> int:
    """Its place in ``_PEERS``; what is none of them is an outage."""
    outage = _PEERS.index(PeerOutage)
    return next((place for place, kind in enumerate(_PEERS) if isinstance(error, kind)), outage)


class Collectives:
    """Gathers and broadcasts small values between data-parallel ranks, of split models their
    heads. With one everything is local."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._group: dist.ProcessGroup | None = None
        if ranks.dp_size > 1:
            self._group = dist.new_group(
                None if ranks.heads is None else list(ranks.heads),
                backend="gloo",
                timeout=LONGEST_WAIT,
                use_local_synchronization=ranks.heads is not None,  # other processes do not call it
            )

    def all_gather(self, value: Any) -> list[Any]:
        """Every data-parallel rank's JSON-able ``value``, in their order. Collective."""
        if self._group is None:
            return [value]
        payload = torch.frombuffer(bytearray(orjson.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.dp_size)]
        self._gather(sizes, torch.tensor([len(payload)]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = payload
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks.dp_size)]
        self._gather(rows, padded)
        return [
            orjson.loads(row[: int(size)].numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank. Collective."""
        return self.all_gather(value if self.ranks.rank == 0 else None)[0]

    def open_store(self) -> dist.TCPStore | None:
        """A store of its own that all ranks see; None where nobody else is there. Collective."""
        if self.ranks.dp_size == 1:
            return None
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        store: dist.TCPStore | None = None
        if self.ranks.rank == 0:
            store = serve_store(host, wait_for_workers=False)
        port = self.broadcast(None if store is None else store.port)
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)
        return store

    def end_together(self, error: Exception | None) -> None:
        """Raises on all ranks if one of them has an ``error``: a stop, or an outage. Collective.

        A stop goes first, then a reward, an outage, a withdrawal, too many exclusions. A rank
        raises its own, the others what is in ``_PEERS`` for it, with what the first one said.
        """
        mine = None if error is None else [_kind(error), str(error)]
        told = [
            (rank, *said) for rank, said in enumerate(self.all_gather(mine)) if said is not None
        ]
        if not told:
            return
        first = min(kind for _, kind, _ in told)  # what goes first, on whichever rank
        if error is not None and _kind(error) == first:
            raise error
        rank, _, text = next(each for each in told if each[1] == first)
        raise _PEERS[first](f"rank {rank}: {text}")

    def in_lockstep(self, work: Iterator[T], dummy: Callable[[], T]) -> Iterator[T]:
        """Yields equally often on all ranks: own work while there is some, then ``dummy()``.

        So a rank without work still joins the collectives of the others. Raises ``PeerFailed`` if
        another rank's ``work`` raised.
        """
        while True:
            try:
                item = next(work, None)
                status = FINISHED if item is None else WORK
            except BaseException:
                self.all_gather(FAILED)
                raise
            statuses = self.all_gather(status)
            if FAILED in statuses:
                raise PeerFailed(f"rank {statuses.index(FAILED)} failed")
            if set(statuses) == {FINISHED}:
                return
            yield dummy() if item is None else item

    def _gather(self, outputs: list[torch.Tensor], mine: torch.Tensor) -> None:
        """``all_gather`` that lets Python's signal handlers run, which a wait in C would defer."""
        work = dist.all_gather(outputs, mine, group=self._group, async_op=True)
        wait_with_signals(work, self._group, longest_pause_s=LONGEST_PAUSE_S)


def on_rank_zero(collectives: Collectives, work: Callable[[], T]) -> T:
    """What ``work()`` of rank 0 returns, a JSON-able value. Collective.

    Raises what it raises, on the other ranks a ``ConfigError``.
    """
    if collectives.ranks.rank != 0:
        problem, value = collectives.broadcast(None)
        if problem is not None:
            raise ConfigError(f"rank 0: {problem}")
        return value
    try:
        value = work()
    except (ConfigError, OSError) as error:
        collectives.broadcast([str(error), None])
        raise
    collectives.broadcast([None, value])
    return value
