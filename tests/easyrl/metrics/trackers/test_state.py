"""A resumed run logs no step twice; a slow or broken service delays and ends nothing."""

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from easyrl.metrics.trackers import background
from easyrl.metrics.trackers.background import MOST_WAITING, BackgroundTracker
from easyrl.metrics.trackers.ending import RunEnding
from easyrl.metrics.trackers.state import ContinuedTracker, TrackerState
from easyrl.schema import NEEDS_CHANGE, EndedBySignal, InterruptedRun
from tests.waiting import wait_until


class Told:
    """A tracker that keeps what it was told."""

    def __init__(self):
        self.calls = []

    def log(self, step, metrics):
        self.calls.append((step, metrics))

    @property
    def steps(self):
        return [call[0] for call in self.calls if isinstance(call[0], int)]

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


class Down(Told):
    """A service that has no answer for some steps."""

    def __init__(self, *steps):
        super().__init__()
        self.down = set(steps)

    def log(self, step, metrics):
        if step in self.down:
            raise ConnectionError("no route")
        super().log(step, metrics)


def in_background(output, service, *steps, **options):
    """An attempt that a thread tells ``service`` of, as MLflow is told."""
    state = TrackerState(output, "service")
    tracker = BackgroundTracker(ContinuedTracker(service, state), left_out=state.missed, **options)
    for step in steps:
        with suppress(ConnectionError, BufferError):
            tracker.log(step, {"loss": float(step)})
    return tracker


def test_a_failure_does_not_keep_the_end_from_waiting_for_what_is_queued(tmp_path):
    class SlowAfter(Down):
        def log(self, step, metrics):
            if step == 2:
                wait_until(lambda: closing)
                time.sleep(0.2)
            super().log(step, metrics)

    service, closing = SlowAfter(1), []
    tracker = in_background(tmp_path, service, 1)
    wait_until(lambda: not tracker._problems.empty())
    with pytest.raises(ConnectionError):
        tracker.log(2, {"loss": 2.0})
    tracker._problems.put(ConnectionError("once more"))
    closing.append(True)
    with pytest.raises(ConnectionError, match="once more"):
        tracker.close()
    assert service.calls[-1] == "closed" and service.steps == [2]


def test_a_step_that_the_service_has_not_got_is_logged_by_the_resumed_run(tmp_path):
    """Also where later ones have got there."""
    with suppress(ConnectionError):
        in_background(tmp_path, Down(2, 3), 1, 2, 3, 4).close()
    resumed = Told()
    in_background(tmp_path, resumed, 1, 2, 3, 4, 5).close()
    assert resumed.steps == [2, 3, 5]
    third = Told()
    in_background(tmp_path, third, 2, 3, 4, 5, 6).close()
    assert third.steps == [6]


def test_an_earlier_failure_does_not_leave_a_later_step_unmarked(tmp_path):
    service = Down(1)
    tracker = in_background(tmp_path, service, 1)
    wait_until(lambda: not tracker._problems.empty())
    with pytest.raises(ConnectionError):  # of step 1; step 2 is in the queue
        tracker.log(2, {"loss": 2.0})
    tracker.close()
    assert service.steps == [2]
    resumed = Told()
    in_background(tmp_path, resumed, 1, 2, 3).close()
    assert resumed.steps == [1, 3]


def test_what_there_was_no_room_for_is_logged_by_the_resumed_run(tmp_path, monkeypatch):
    class Held(Told):
        def log(self, step, metrics):
            begun.set()
            assert go_on.wait(20)
            super().log(step, metrics)

    monkeypatch.setattr(background, "MOST_WAITING", 2)
    begun, go_on = threading.Event(), threading.Event()
    service = Held()
    tracker = in_background(tmp_path, service, 0)
    assert begun.wait(10)
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
    with pytest.raises(BufferError):
        tracker.log(3, {"loss": 1.0})
    go_on.set()
    wait_until(lambda: service.steps == [0, 1, 2])
    tracker.close()
    resumed = Told()
    monkeypatch.undo()  # the end needs room, too
    in_background(tmp_path, resumed, 2, 3, 4).close()
    assert service.steps == [0, 1, 2] and resumed.steps == [3, 4]


KILLED = """
import os, sys, threading
from pathlib import Path
from tests.easyrl.metrics.trackers.test_state import Told, in_background

class Hanging(Told):
    def log(self, step, metrics):
        if step == 2:
            print("hangs", flush=True)
            threading.Event().wait()

in_background(Path(sys.argv[1]), Hanging(), 0, 1, 2, 3)
threading.Event().wait()
"""


def test_a_killed_run_has_not_told_what_still_wait_until(tmp_path):
    root = Path(__file__).resolve().parents[4]
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"hangs\n"
        process.kill()
    resumed = Told()
    in_background(tmp_path, resumed, 0, 1, 2, 3, 4).close()
    assert resumed.steps == [2, 3, 4]


@pytest.mark.parametrize(
    "error, state",
    [
        (None, "finished"),
        (InterruptedRun("stopped, saved", status=0), "stopped"),
        (EndedBySignal(143), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (InterruptedRun("all endpoints are down"), "failed"),
        (InterruptedRun("a reward fails", status=NEEDS_CHANGE), "failed"),
        (ZeroDivisionError("in a reward"), "failed"),
    ],
)
def test_how_a_run_ends_is_known_when_trackers_close(error, state):
    ending, seen = RunEnding(), []
    with suppress(BaseException), ExitStack() as opened:
        opened.callback(lambda: seen.append(ending.state))
        opened.push(ending.take)
        if error is not None:
            raise error
    assert seen == [state]
    assert ending.problem == (f"{type(error).__name__}: {error}" if state == "failed" else "")
