"""What the data-parallel ranks tell each other, over a CPU group and in JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, TypeVar

import orjson
import torch
import torch.distributed as dist

T = TypeVar("T")


class Status(IntEnum):
    """What a rank has for the next round of micro-batches (DESIGN §7)."""

    WORK = 0
    FINISHED = 1
    FAILED = 2


class PeerFailed(RuntimeError):
    """Another rank failed; its own log has the traceback."""


class Agreement:
    """Exchanges small values between ranks. With one rank everything is local."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._group = dist.new_group(backend="gloo") if num_ranks > 1 else None

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's JSON-able ``value``, in rank order. Collective."""
        if self._group is None:
            return [value]
        payload = torch.frombuffer(bytearray(orjson.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = payload
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.num_ranks)]
        dist.all_gather(rows, padded, group=self._group)
        return [
            orjson.loads(row[: int(size)].numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def from_rank_zero(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank. Collective."""
        return self.exchange(value if self.rank == 0 else None)[0]

    def in_lockstep(self, work: Iterator[T], dummy: Callable[[], T]) -> Iterator[T]:
        """Yields equally often on all ranks: own work while there is some, then ``dummy()``.

        Ranks agree before each item, so that a rank without work still joins the collectives of the
        others, and all stop together. Raises ``PeerFailed`` if another rank's ``work`` raised.
        """
        while True:
            try:
                item = next(work, None)
                status = Status.FINISHED if item is None else Status.WORK
            except BaseException:
                self.exchange(Status.FAILED)
                raise
            statuses = self.exchange(status)
            if Status.FAILED in statuses:
                raise PeerFailed(f"rank {statuses.index(Status.FAILED)} failed")
            if all(s == Status.FINISHED for s in statuses):
                return
            yield dummy() if item is None else item
