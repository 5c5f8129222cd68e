"""Where a thread's time goes: seconds by phase, each second in one of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

OTHER = "other"  # outside of all phases


class PhaseClock:
    """Counts the seconds of the thread that uses it.

    A phase inside another interrupts it: a second counts for the innermost.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._running = [OTHER]
        self._since_s = time.monotonic()

    @property
    def running(self) -> str:
        """The phase that the thread is in. From any thread."""
        return self._running[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def move(self, seconds: float, *, of: str, to: str) -> None:
        """What was counted for one phase and is known to have been another."""
        self._count()
        self._seconds[of] -= seconds
        self._seconds[to] += seconds

    def take(self) -> dict[str, float]:
        """Seconds by phase since this was called before; their sum is the time since then."""
        self._count()
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _count(self) -> None:
        now_s = time.monotonic()
        self._seconds[self._running[-1]] += now_s - self._since_s
        self._since_s = now_s
