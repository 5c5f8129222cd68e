"""What ranks tell each other of an open batch, without a collective: a shared key-value store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from easyrl.runtime.collectives import Collectives
from easyrl.schema import Decision, Exclusion

_decode = msgspec.json.Decoder(tuple[int, Decision]).decode


CHUNK_BYTES = 2**22  # of a group: a store refuses values of 8 MiB


class SharedBatch:
    """The decisions of one batch on all ranks (``SharedDecisions``), which belong to one thread,
    and their queues (``SharedQueues``), which any may use.

    Decision number n of all ranks is under the key ``<name>/n``: the number is drawn first, so that
    every rank reads the decisions in one order, up to the first that is not written yet. What rank
    r has queued is under ``<name>/queued/r``; a group on its way, in pieces, under
    ``<name>/group/<position>/<piece>``, until the rank that trains it has taken it.
    """

    def __init__(self, store: dist.TCPStore, name: str, rank: int, num_ranks: int = 1) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_read = 0
        self._written = [f"{name}/claims", f"{name}/decisions", f"{name}/queued/{rank}"]

    def claim(self) -> int:
        return self._store.add(f"{self._name}/claims", 1) - 1

    def publish(
        self,
        position: int,
        accepted: bool,
        exclusion: Exclusion | None = None,
        trains: int | None = None,
    ) -> None:
        number = self._store.add(f"{self._name}/decisions", 1) - 1
        said = (self._rank, Decision(position, accepted, exclusion, trains))
        self._write(f"{number}", msgspec.json.encode(said).decode())

    def news(self) -> Sequence[Decision]:
        found = []
        while (said := self._read(f"{self._num_read}")) is not None:
            rank, decision = _decode(said)
            self._num_read += 1
            if rank != self._rank:
                found.append(decision)
        return found

    def announce(self, notice: str, reason: str) -> None:
        self._write(notice, f"rank {self._rank}: {reason}" if notice == "failure" else reason)

    def announced(self, notice: str) -> str | None:
        return self._read(notice)

    def queued(self) -> Sequence[int]:
        return [self._store.add(f"{self._name}/queued/{r}", 0) for r in range(self._num_ranks)]

    def enqueue(self, rank: int, cost: int) -> None:
        self._store.add(f"{self._name}/queued/{rank}", cost)

    def put_group(self, position: int, payload: bytes) -> None:
        for piece, start in enumerate(range(0, len(payload), CHUNK_BYTES)):
            chunk = payload[start : start + CHUNK_BYTES]
            self._write(f"group/{position}/{piece}", chunk)

    def take_group(self, position: int) -> bytes:
        pieces: list[bytes] = []
        while self._store.check([key := f"{self._name}/group/{position}/{len(pieces)}"]):
            pieces.append(self._store.get(key))
            self._store.delete_key(key)
        if not pieces:
            raise LookupError(f"the group of position {position} was handed over and is not there")
        return b"".join(pieces)

    def forget(self) -> None:
        """Removes what this rank has written; nobody reads it any more."""
        for key in self._written:
            self._store.delete_key(key)
        self._written.clear()

    def _write(self, key: str, value: str | bytes) -> None:
        self._store.set(f"{self._name}/{key}", value)  # type: ignore[arg-type]  # bytes as they are
        self._written.append(f"{self._name}/{key}")

    def _read(self, key: str) -> str | None:
        key = f"{self._name}/{key}"
        return self._store.get(key).decode() if self._store.check([key]) else None


class RankCoordination:
    """Opens what several ranks share of each batch. All ranks call every method."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._store = collectives.open_store()  # None where nobody else is there
        self._open: list[SharedBatch] = []

    def open_batch(self, name: str) -> SharedBatch:
        assert self._store is not None, "one rank shares nothing"
        ranks = self._collectives.ranks
        if len(self._open) == 2:  # every rank has read what the first of them left
            self._open.pop(0).forget()
        self._open.append(SharedBatch(self._store, name, ranks.dp_rank, ranks.dp_size))
        return self._open[-1]

    def gather(self, value: Any) -> list[Any]:
        return self._collectives.all_gather(value)
