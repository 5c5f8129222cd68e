"""Seconds of tasks that overlap count once, gaps between them not at all."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from easyrl.runtime import busy_time
from easyrl.runtime.busy_time import BusyTime
from tests.easyrl.runtime.test_phase_clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(busy_time, "time", clock)
    return clock


def test_overlapping_tasks_count_once(clock: Clock) -> None:
    busy = BusyTime()
    clock.passes(1)
    with ExitStack() as first:
        first.enter_context(busy.task())
        clock.passes(2)
        with busy.task():
            clock.passes(4)
            assert busy.seconds() == 6  # while both run
            first.close()
            clock.passes(8)
    assert busy.seconds() == 14
    clock.passes(16)
    with pytest.raises(OSError), busy.task():
        clock.passes(32)
        raise OSError
    clock.passes(64)
    assert busy.seconds() == 46
