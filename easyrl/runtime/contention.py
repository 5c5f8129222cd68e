"""Whether this process's threads wait for processors on which somebody else computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

DELAYS = Path("/proc/thread-self/schedstat")  # Linux: ns on a processor, ns waiting for one, turns
CROWDED = (
    0.2  # share of a stretch that is waiting; 0.01 on a quiet machine, 0.45 beside one process
)
SHORTEST_S = 0.005  # of a stretch that tells something
FIRST_PAUSE, LONGEST_PAUSE = 4, 128  # stretches with one thread before several are tried again


class Contention:
    """Lets a process compute with one thread while others compute on its processors.

    Threads of OpenMP that wait for each other spin: where one of them has no processor, the others
    use up theirs, and a step takes ten times as long as with one thread (docs/benchmarks.md, "Cores
    follow the work"). What is measured is the calling thread's own waiting.

    Args:
        now: seconds of a clock, and seconds for which the calling thread has waited for a
            processor so far.
    """

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None) -> None:
        self._now = now or _clock_and_delay
        self._began: tuple[float, float] | None = None  # of a stretch with several threads
        self._pause, self._next_pause = 0, FIRST_PAUSE

    def begin(self, num_threads: int) -> int:
        """A stretch of computing begins; with how many threads."""
        if num_threads > 1 and self._pause > 0:
            self._pause -= 1
            return 1
        self._began = self._now() if num_threads > 1 else None
        return num_threads

    def go_on(self, num_threads: int) -> int:
        """In the middle of a stretch its threads are to be so many; how many it has then.

        Nothing is learnt from it any more, as another process that shares was there.
        """
        self._began = None
        return 1 if self._pause > 0 else num_threads

    def end(self, *, tells: bool = True) -> None:
        """The stretch ends, if there is one.

        Args:
            tells: whether waiting in it means that somebody else computes for long.
        """
        if self._began is None:
            return
        elapsed_s, delay_s = (b - a for a, b in zip(self._began, self._now(), strict=True))
        self._began = None
        if not tells or elapsed_s < SHORTEST_S:
            return
        if delay_s > CROWDED * elapsed_s:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        else:
            self._next_pause = FIRST_PAUSE


def _clock_and_delay() -> tuple[float, float]:
    try:
        delay_ns = int(DELAYS.read_bytes().split()[1])
    except (OSError, IndexError):  # a kernel that does not count
        delay_ns = 0
    return time.perf_counter(), delay_ns / 1e9
