"""Where a thread's time goes: seconds by phase, each second in one of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

OTHER = "other"  # outside of all phases
OnInterval = Callable[[str, float, float, Mapping[str, int | str]], object]


class Phase(NamedTuple):
    """What the thread does, and what else is known of it."""

    name: str
    args: Mapping[str, int | str]


class PhaseClock:
    """Counts the seconds of the thread that uses it.

    A phase inside another interrupts it: a second counts for the innermost. ``on_interval`` are
    told each stretch of a phase: its name, start and end in seconds of ``time.monotonic``, and
    args.
    """

    def __init__(self, *on_interval: OnInterval) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._running = [Phase(OTHER, {})]
        self._since_s = time.monotonic()
        self._on_interval = on_interval

    @property
    def running(self) -> str:
        """The phase that the thread is in. From any thread."""
        return self._running[-1].name

    @contextmanager
    def phase(self, name: str, **args: int | str) -> Iterator[None]:
        self._count()
        self._running.append(Phase(name, args))
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def take(self) -> dict[str, float]:
        """Seconds by phase since this was called before; their sum is the time since then."""
        self._count()
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _count(self) -> None:
        now_s, phase = time.monotonic(), self._running[-1]
        self._seconds[phase.name] += now_s - self._since_s
        if now_s > self._since_s:
            for told in self._on_interval:
                told(phase.name, self._since_s, now_s, phase.args)
        self._since_s = now_s
