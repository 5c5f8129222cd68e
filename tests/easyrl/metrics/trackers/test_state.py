"""A resumed run logs no step twice; a slow or broken service delays and ends nothing."""

import threading
import time

import pytest

from easyrl.metrics.trackers.background import MOST_WAITING, BackgroundTracker
from easyrl.metrics.trackers.state import ContinuedTracker, TrackerState


class Told:
    """A tracker that keeps what it was told."""

    def __init__(self):
        self.calls = []

    def log(self, step, metrics):
        self.calls.append((step, metrics))

    def note(self, name, text):
        self.calls.append((name, text))

    def close(self):
        self.calls.append("closed")


def attempt(output, *reports):
    """What the tracker is told of ``reports`` in one attempt of the run."""
    told = Told()
    tracker = ContinuedTracker(told, TrackerState(output, "service"))
    for step, metrics in reports:
        tracker.log(step, metrics)
    return told.calls


def test_steps_that_are_taken_again_are_not_logged_again(tmp_path):
    first = [(step, {"loss": float(step)}) for step in range(4)]
    assert attempt(tmp_path, *first) == first
    again = [(step, {"loss": -1.0}) for step in (2, 3, 4)]
    assert attempt(tmp_path, *again) == [(4, {"loss": -1.0})]
    # killed before its first step: what the attempt before it had logged still counts
    assert attempt(tmp_path) == []
    assert attempt(tmp_path, (4, {"loss": 0.0}), (5, {"loss": 0.0})) == [(5, {"loss": 0.0})]


def test_an_evaluation_that_comes_after_a_restart_is_logged_once(tmp_path):
    """Its step was reported by the attempt before."""
    attempt(tmp_path, (3, {"loss": 1.0}))
    figures = {"eval/accuracy": 0.5, "eval/math/avg@8": 0.5, "time/evaluation_s": 2.0}
    assert attempt(tmp_path, (3, figures)) == [(3, figures)]
    assert attempt(tmp_path, (3, figures), (4, {"loss": 1.0, **figures})) == [
        (4, {"loss": 1.0, **figures})
    ]


def test_a_file_that_cannot_be_read_is_told_of_and_begins_anew(tmp_path, caplog):
    state = TrackerState(tmp_path, "service")
    state.keep_run("abc")
    assert TrackerState(tmp_path, "service").run_id == "abc"
    file = tmp_path / "trackers" / "service.json"
    for damaged in (b"{", b'{"run_id": 7}', b"\xff"):
        file.write_bytes(damaged)
        assert TrackerState(tmp_path, "service").run_id is None
    assert caplog.text.count("service.json") == 3 and "begins a new run" in caplog.text


def test_what_is_logged_in_the_background_arrives_in_order_before_the_end():
    told = Told()
    tracker = BackgroundTracker(told)
    for step in range(50):
        tracker.log(step, {"loss": float(step)})
    tracker.note("certificate", "ab")
    tracker.close()
    tracker.close()
    steps = [(step, {"loss": float(step)}) for step in range(50)]
    assert told.calls == [*steps, ("certificate", "ab"), "closed"]


def test_a_slow_service_delays_no_step_and_the_end_for_a_while_only():
    class Slow(Told):
        def log(self, step, metrics):
            begun.set()
            go_on.wait(20)

    begun, go_on = threading.Event(), threading.Event()
    tracker = BackgroundTracker(Slow(), close_s=0.1)
    start = time.monotonic()
    tracker.log(0, {})
    assert begun.wait(10)
    for step in range(MOST_WAITING):
        tracker.log(step, {})
    with pytest.raises(BufferError, match=f"{MOST_WAITING} reports behind"):
        tracker.log(1, {})
    assert time.monotonic() - start < 5
    go_on.set()
    ends_late = BackgroundTracker(Slow(), close_s=0.1)
    go_on.clear()
    begun.clear()
    ends_late.log(0, {})
    assert begun.wait(10)
    with pytest.raises(BufferError, match="not taken all within 0.1 s"):
        ends_late.close()
    go_on.set()


def test_what_fails_in_the_background_is_told_by_the_next_call():
    class Failing(Told):
        def log(self, step, metrics):
            raise ConnectionError("no route")

    tracker = BackgroundTracker(Failing())
    tracker.log(0, {})
    with pytest.raises(ConnectionError, match="no route"):
        tracker.close()
