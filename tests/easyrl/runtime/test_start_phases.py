"""What is told of a start: each phase's time, and that a long one goes on."""

from __future__ import annotations

import io
import re
import time

from easyrl.runtime import start_phases
from easyrl.runtime.start_phases import StartPhases


def told(stream: io.StringIO) -> list[str]:
    return [re.sub(r"[\d.]+ s", "T s", line) for line in stream.getvalue().splitlines()]


def test_a_phase_is_told_when_it_is_over() -> None:
    stream = io.StringIO()
    phases = StartPhases(is_told=True, stream=stream)
    phases.begin("data")
    assert told(stream) == []
    phases.begin("model")
    time.sleep(0.2)
    phases.end()
    phases.end()
    assert told(stream) == ["easyrl: data T s", "easyrl: model T s"]
    data, model = (float(s) for s in re.findall(r"([\d.]+) s", stream.getvalue()))
    assert data < 0.2 <= model < 5


def test_a_phase_that_takes_long_is_told_meanwhile_and_an_error_ends_it(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(start_phases, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr(start_phases, "SAY_EVERY_S", 0.2)
    stream = io.StringIO()
    phases = StartPhases(is_told=True, stream=stream)
    phases.begin("endpoints")
    deadline = time.monotonic() + 20
    while len(told(stream)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    phases.abandon()
    assert set(told(stream)) == {"easyrl: endpoints … T s so far"}
    number = len(told(stream))
    assert number >= 2
    time.sleep(0.5)
    assert len(told(stream)) <= number + 1  # one may have been on its way


def test_other_ranks_say_nothing() -> None:
    stream = io.StringIO()
    phases = StartPhases(is_told=False, stream=stream)
    phases.begin("data")
    phases.end()
    assert stream.getvalue() == ""
