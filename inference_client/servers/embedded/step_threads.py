"""Threads of a decode step: the server's half of the cores, or all of them where that is faster.

Small steps get slower with more threads, which wait for one another behind each operation; large
ones, of many sequences or long ones, get faster. Which it is depends on model, machine and what
else runs there, and is found by timing (docs/benchmarks.md, "Cores follow the work").
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from easyrl.runtime.shared_cores import SharedCores

NUM_TIMED = 5  # steps, the last ones with each number of threads
TIMED_AGAIN = 250  # after so many steps, what was slower
WORTH_IT = 0.9  # of the time, at most: whoever else has something to do finds no core idle


class StepThreads:
    """Chooses between two numbers of threads while nobody else computes. Belongs to one thread.

    Args:
        now: seconds of a clock.
    """

    def __init__(self, cores: SharedCores, now: Callable[[], float] = time.perf_counter) -> None:
        self._cores, self._now = cores, now
        # by work, in powers of two, and whether all cores were used
        self._seconds: defaultdict[tuple[int, bool], deque[float]] = defaultdict(
            lambda: deque(maxlen=NUM_TIMED)
        )
        self._num_steps: Counter[int] = Counter()

    @contextmanager
    def step(self, work: int) -> Iterator[None]:
        """Inside, a step is computed; the process has taken its cores, and keeps them.

        Args:
            work: grows with the step's time, and only like steps have the same: sequences times
                positions. 0: it is like no other, and with the usual number of threads.
        """
        size = work.bit_length()
        with_all = work > 0 and self._cores.has_more and self._tries_all(size)
        self._cores.take(all_if_alone=with_all)
        start_s = self._now()
        yield
        if work > 0 and self._cores.has_all_it_may(with_all):
            self._seconds[size, with_all].append(self._now() - start_s)
            self._num_steps[size] += 1

    def _tries_all(self, size: int) -> bool:
        usual, with_all = (self._seconds[size, each] for each in (False, True))
        for each, timed in ((False, usual), (True, with_all)):
            if len(timed) < NUM_TIMED:
                return each
        is_faster = median(with_all) < WORTH_IT * median(usual)
        return is_faster != (self._num_steps[size] % TIMED_AGAIN < NUM_TIMED)
