"""Heartbeats of the ranks: a node that is gone or cannot be reached ends the run, for now.

A connection that is cut stays open for hours: neither a collective nor the store would notice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch.distributed import Store

logger = logging.getLogger(__name__)

BEAT_S = 1.0
LONGEST_GAP_S = 10.0  # between two looks; more than that this process itself was stopped
PEERS_S = 5 * BEAT_S  # until the other ranks have read which one is lost
CLOSE_S = 2 * BEAT_S  # the store may be out of reach
LOST = "lost"  # key of what rank 0 says
LEFT = b"left"  # instead of a count: this rank needs no watching any more


class Silence:
    """Seconds since each rank's count was last another one, without gaps in the watching."""

    def __init__(self, ranks: range) -> None:
        self._counts: dict[int, bytes] = {}
        self._silent_s = dict.fromkeys(ranks, 0.0)

    def hear(self, rank: int, count: bytes) -> None:
        if self._counts.get(rank) != count:
            self._counts[rank] = count
            self._silent_s[rank] = 0.0

    def pass_by(self, seconds: float) -> None:
        for rank in self._silent_s:
            self._silent_s[rank] += min(seconds, LONGEST_GAP_S)

    def longer_than(self, limit_s: float) -> list[int]:
        """The ranks that are still expected and were not heard for ``limit_s``."""
        silent = [rank for rank, silent_s in self._silent_s.items() if silent_s > limit_s]
        return [rank for rank in silent if self._counts.get(rank) != LEFT]


class Heartbeats:
    """Calls ``end(reason)`` once if another rank is silent for ``timeout_s``, inside the context.

    Rank 0, which keeps the store, listens to all ranks, and they to rank 0: it tells them who is
    lost. A rank that cannot reach the store hears nothing of rank 0. All ranks enter; one that
    leaves is not expected any more.

    Args:
        store: of all ranks, a connection of its own: a call on one that is cut never returns.
        timeout_s: 0: nobody listens.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        end: Callable[[str], object],
        *,
        beat_s: float = BEAT_S,
    ) -> None:
        self._store = store if timeout_s > 0 else None  # None: nobody else is there
        self._rank = rank
        self._peers = range(1, num_ranks) if rank == 0 else range(1)
        self._timeout_s = timeout_s
        self._end = end
        self._beat_s = beat_s
        self._silence = Silence(self._peers)
        self._told: str | None = None  # by rank 0
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"easyrl-{name}", daemon=True)
            for work, name in ((self._beat, "heartbeat"), (self._watch, "heartbeat-watch"))
        ]

    def __enter__(self) -> Heartbeats:
        if self._store is not None:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._store is not None:
            for thread in self._threads:
                thread.join(CLOSE_S)

    def _beat(self) -> None:
        assert self._store is not None
        count = 0
        try:
            while not self._closed.wait(self._beat_s):
                count += 1
                self._store.set(_key(self._rank), str(count))
                known = [peer for peer in self._peers if self._store.check([_key(peer)])]
                for peer in known:
                    self._silence.hear(peer, self._store.get(_key(peer)))
                if self._rank != 0 and self._store.check([LOST]):
                    self._told = self._store.get(LOST).decode()
            self._store.set(_key(self._rank), LEFT.decode())
        except RuntimeError as error:  # rank 0 has ended; it does that last, or has its own reason
            logger.debug("rank 0 keeps no heartbeats any more: %s", error)
            self._closed.set()

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._closed.wait(self._beat_s):
            now_s = time.monotonic()
            self._silence.pass_by(now_s - looked_s)
            looked_s = now_s
            reason = self._told or self._reason()
            if reason is not None:
                self._say(reason)
                self._end(reason)
                return

    def _reason(self) -> str | None:
        silent = self._silence.longer_than(self._timeout_s)
        if not silent:
            return None
        return (
            f"no sign of life of rank {', '.join(map(str, silent))} for {self._timeout_s:g} s "
            "(watchdog.peer_timeout_s): the node, or the network to it, is down"
        )

    def _say(self, reason: str) -> None:
        if self._rank == 0:
            assert self._store is not None
            self._store.set(LOST, reason)
            self._closed.wait(PEERS_S)  # with this process the store is gone


def _key(rank: int) -> str:
    return f"beat/{rank}"
