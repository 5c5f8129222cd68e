"""Each second counts once, for the innermost phase."""

from __future__ import annotations

import pytest

from easyrl.runtime import phase_clock
from easyrl.runtime.phase_clock import PhaseClock


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phase_clock, "time", clock)
    return clock


def test_a_phase_inside_another_interrupts_it(clock: Clock) -> None:
    phases = PhaseClock()
    clock.passes(1)
    with phases.phase("sync"):
        clock.passes(2)
        with phases.phase("ledger"):
            clock.passes(4)
        clock.passes(8)
    clock.passes(16)
    assert phases.take() == {"other": 17, "sync": 10, "ledger": 4}
    clock.passes(32)
    assert phases.take() == {"other": 32}


def test_a_phase_that_raises_is_over(clock: Clock) -> None:
    phases = PhaseClock()
    with pytest.raises(OSError), phases.phase("save"):
        clock.passes(1)
        raise OSError
    clock.passes(2)
    assert phases.take() == {"other": 2, "save": 1}


def test_one_that_is_taken_inside_a_phase_goes_on_in_it(clock: Clock) -> None:
    phases = PhaseClock()
    with phases.phase("report"):
        clock.passes(1)
        assert phases.take() == {"other": 0, "report": 1}
        clock.passes(2)
    assert phases.take() == {"report": 2, "other": 0}


def test_each_stretch_of_a_phase_is_told_once_and_without_gaps(clock: Clock) -> None:
    told: list[tuple] = []
    phases = PhaseClock(lambda *stretch: told.append(stretch))
    clock.passes(1)
    with phases.phase("pack"):
        clock.passes(2)
        with phases.phase("train", num_tokens=7):
            clock.passes(4)
        with phases.phase("wait"):
            pass  # no time: nothing to tell
        clock.passes(8)
    phases.take()
    assert told == [
        ("other", 100, 101, {}),
        ("pack", 101, 103, {}),
        ("train", 103, 107, {"num_tokens": 7}),
        ("pack", 107, 115, {}),
    ]
