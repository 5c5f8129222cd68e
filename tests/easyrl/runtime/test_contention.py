"""One thread while others compute on this process's processors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from easyrl.runtime.contention import (
    CROWDED,
    DELAYS,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    SHORTEST_S,
    Contention,
    _clock_and_delay,
)


class Machine:
    """A clock and a run queue; ``stretch`` lets a thread compute on it."""

    def __init__(self) -> None:
        self.clock_s = self.delay_s = 0.0
        self.contention = Contention(lambda: (self.clock_s, self.delay_s))

    def stretch(
        self, share: float, seconds: float = 1.0, threads: int = 2, tells: bool = True
    ) -> int:
        """Of which ``share`` is waiting where several threads compute; how many that were."""
        taken = self.contention.begin(threads)
        self.clock_s += seconds
        self.delay_s += share * seconds if taken > 1 else 0.0
        self.contention.end(tells=tells)
        return taken


def test_all_threads_on_a_quiet_machine() -> None:
    machine = Machine()
    assert [machine.stretch(0.9 * CROWDED) for _ in range(50)] == [2] * 50


def test_a_crowded_stretch_is_followed_by_some_with_one_thread_and_then_tried_again() -> None:
    machine = Machine()
    assert machine.stretch(0.5) == 2
    taken = [machine.stretch(0.5) for _ in range(FIRST_PAUSE + 1 + 2 * FIRST_PAUSE + 1)]
    assert taken == [1] * FIRST_PAUSE + [2] + [1] * 2 * FIRST_PAUSE + [2]


def test_tries_become_rare_and_a_quiet_one_ends_it() -> None:
    machine = Machine()
    crowded = [machine.stretch(0.5) for _ in range(2000)]
    last = len(crowded) - 1 - crowded[::-1].index(2)
    before = last - 1 - crowded[:last][::-1].index(2)
    assert last - before == LONGEST_PAUSE + 1
    while machine.stretch(0.0) == 1:  # the others are gone
        pass
    assert [machine.stretch(0.0) for _ in range(5)] == [2] * 5
    machine.stretch(0.5)
    assert [machine.stretch(0.0) for _ in range(FIRST_PAUSE + 1)] == [1] * FIRST_PAUSE + [2]


def test_what_is_too_short_or_has_one_thread_tells_nothing() -> None:
    machine = Machine()
    for _ in range(5):
        assert machine.stretch(1.0, seconds=0.9 * SHORTEST_S) == 2
        assert machine.stretch(1.0, tells=False) == 2
    assert [machine.stretch(1.0, threads=1) for _ in range(5)] == [1] * 5
    assert machine.stretch(0.0) == 2


def test_waiting_between_stretches_does_not_count() -> None:
    machine = Machine()
    machine.stretch(0.0)
    machine.clock_s, machine.delay_s = machine.clock_s + 9, machine.delay_s + 9
    assert machine.stretch(0.0) == 2


@pytest.mark.skipif(not DELAYS.exists(), reason="needs the scheduler's statistics (Linux)")
def test_the_delay_is_that_of_a_thread_without_a_processor() -> None:
    """Two processes on one processor: each waits about half of the time."""
    found: list[tuple[float, float]] = []

    def compute() -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        found.append(_clock_and_delay())
        while time.perf_counter() - found[0][0] < 0.5:
            pass
        found.append(_clock_and_delay())

    core = min(os.sched_getaffinity(0))
    burn = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
        finally:
            other.kill()
    (began_s, before_s), (ended_s, after_s) = found
    assert (after_s - before_s) / (ended_s - began_s) > CROWDED


def test_a_kernel_that_does_not_count_limits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("easyrl.runtime.contention.DELAYS", DELAYS / "missing")
    contention = Contention()
    for _ in range(3):
        assert contention.begin(2) == 2
        time.sleep(2 * SHORTEST_S)
        contention.end()
