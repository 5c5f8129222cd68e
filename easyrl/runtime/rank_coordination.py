"""What ranks tell each other of an open batch, without a collective: a shared key-value store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from easyrl.runtime.collectives import Collectives


class CountingStore(Protocol):
    """Keys and values that all ranks see (``torch.distributed.TCPStore``)."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class SharedBatch:
    """The decisions of one batch on all ranks (``SharedDecisions``). Belongs to one thread.

    Decision number n of all ranks is under the key ``<name>/n``: the number is drawn first, so that
    every rank reads the decisions in one order, up to the first that is not written yet.
    """

    def __init__(self, store: CountingStore | None, name: str, rank: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._alone = itertools.count()  # claims where nobody else is
        self._num_read = 0
        self._written: list[str] = []

    def claim(self) -> int:
        """A number, from 0, that no other call on any rank is given."""
        if self._store is None:
            return next(self._alone)
        return self._store.add(f"{self._name}/claims", 1) - 1

    def publish(self, position: int, accepted: bool) -> None:
        if self._store is None:
            return
        number = self._store.add(f"{self._name}/decisions", 1) - 1
        key = f"{self._name}/{number}"
        self._store.set(key, f"{self._rank} {position} {int(accepted)}")
        self._written.append(key)

    def news(self) -> Sequence[tuple[int, bool]]:
        """What other ranks have decided since the last call: position, accepted."""
        found = []
        while self._store is not None and self._store.check([f"{self._name}/{self._num_read}"]):
            said = self._store.get(f"{self._name}/{self._num_read}").decode().split()
            rank, position, accepted = map(int, said)
            self._num_read += 1
            if rank != self._rank:
                found.append((position, bool(accepted)))
        return found

    def announce_withdrawal(self, reason: str) -> None:
        """The batch has to begin again, on all ranks."""
        self._announce("withdrawal", reason)

    def withdrawal(self) -> str | None:
        """The reason, if a rank has announced one."""
        return self._announced("withdrawal")

    def announce_failure(self, reason: str) -> None:
        """This rank will decide nothing any more: who waits for it would wait for ever."""
        self._announce("failure", f"rank {self._rank}: {reason}")

    def failure(self) -> str | None:
        """The rank and its reason, if one has announced it."""
        return self._announced("failure")

    def _announce(self, kind: str, reason: str) -> None:
        if self._store is not None:
            key = f"{self._name}/{kind}"
            self._store.set(key, reason)
            self._written.append(key)

    def _announced(self, kind: str) -> str | None:
        key = f"{self._name}/{kind}"
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def forget(self) -> None:
        """Removes what this rank has written; nobody reads it any more."""
        self._written += [f"{self._name}/claims", f"{self._name}/decisions"]
        for key in self._written:
            if self._store is not None:
                self._store.delete_key(key)
        self._written.clear()


class RankCoordination:
    """Opens what ranks share of each batch. All ranks call every method.

    What a batch leaves is removed when the next but one begins: every rank has read it by then.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._store = collectives.open_store()
        self._open: list[SharedBatch] = []

    def open_batch(self, name: str) -> SharedBatch:
        """For the batch ``name``, the same on all ranks."""
        if len(self._open) == 2:
            self._open.pop(0).forget()
        self._open.append(SharedBatch(self._store, name, self._collectives.ranks.rank))
        return self._open[-1]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able ``value``, in rank order."""
        return self._collectives.all_gather(value)
