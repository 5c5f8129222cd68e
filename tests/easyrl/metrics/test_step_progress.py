"""Where the open step is: below the table of a terminal, and as plain lines of long steps."""

from __future__ import annotations

import inspect
import io
import re
import threading

import pytest

from easyrl.metrics import console, step_progress
from easyrl.metrics.console import COLUMNS, ConsoleView
from easyrl.metrics.step_progress import DOES, StepProgress, duration
from easyrl.runtime.phase_clock import OTHER
from easyrl.trainer import accumulation, loop

MOST = StepProgress(
    step=999,
    does=max(DOES.values(), key=len),
    size=1024,
    arrived=1020,
    trained=1000,
    in_flight=16384,
    scoring=8192,
    evaluated=(1200, 2000),
    writes_checkpoint=True,
    endpoints_down=("http://a-host-with-a-rather-long-name.of-some-cluster.example:8000", "b", "c"),
)
FEW = StepProgress(
    step=3,
    does="waits for groups",
    size=32,
    arrived=20,
    trained=12,
    in_flight=96,
    evaluated=(20, 200),
)
STEP = {"reward/mean": 0.5, "time/step_s": 40.0}
CONTROL = re.compile(r"\x1b\[([?\d;]*)([a-zA-Z])|([\r\n])|([^\x1b\r\n]+)")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.strftime = lambda form: "12:34:56"

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


def screen(stream: io.StringIO) -> list[str]:
    """What a person sees: the lines, with what the cursor went back for overwritten."""
    lines, row, column = [""], 0, 0
    for codes, command, control, text in CONTROL.findall(stream.getvalue()):
        if command == "A":
            row -= int(codes or 1)
        elif command == "K":
            assert codes == "2"
            lines[row] = ""
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
        else:
            assert command in ("m", "h", "l")  # colours, the cursor's visibility
    return [line.rstrip() for line in lines]


def test_below_the_table_there_is_where_the_step_is_until_its_row_comes(clock, terminal):
    view = ConsoleView(total_steps=60, stream=terminal)
    view.log(1, STEP)
    view.log(2, STEP)
    clock.now_s += 10
    view.show(FEW)
    clock.now_s += 4.6
    view.show(FEW)
    table, progress = screen(terminal)[:3], screen(terminal)[3:]
    assert [line.split()[0] for line in table] == ["step", "1/60", "2/60"]
    assert progress == [
        "step 3/60  15 s  waits for groups 5 s  left 0:38:25",  # 58 steps of 40 s
        "groups 20/32  trained 12  in flight 96  eval 20/200",
    ]
    clock.now_s += 100  # longer than the others were
    view.show(StepProgress(step=3, does="trains", endpoints_down=("http://x:1", "http://y:2")))
    assert screen(terminal)[3:] == [
        "step 3/60  115 s  trains 0 s  left 0:38:00",
        "down: http://x:1 and 1 more",
    ]
    view.log(3, STEP)
    shown = "\n".join(screen(terminal))
    assert "3/60" in shown and "trains" not in shown and "down" not in shown
    view.show(FEW)
    view.close()
    left = [line for line in screen(terminal) if line]
    assert [line.split()[0] for line in left] == ["step", "1/60", "2/60", "3/60", "left"]


def test_behind_the_last_step_the_run_ends(clock, terminal):
    view = ConsoleView(total_steps=60, stream=terminal)
    view.show(StepProgress(step=62, does="trains"))  # of two steps each; the last has one
    assert screen(terminal)[-1] == "step 60/60  0 s  trains 0 s"
    view.log(60, STEP)
    clock.now_s += 3
    view.show(StepProgress(step=62, does=DOES["other"], writes_checkpoint=True))
    assert screen(terminal)[-2:] == ["all steps are trained  3 s", "writes a checkpoint"]
    view.close()


def test_the_most_that_there_is_to_say_fits_80_columns(clock, terminal):
    view = ConsoleView(total_steps=9999, stream=terminal)
    view.log(998, {name: 1234.0 for _, name, _ in COLUMNS})
    clock.now_s += 7000
    view.show(MOST)
    view.show(MOST)
    clock.now_s += 7000
    view.show(MOST)
    lines = screen(terminal)[-3:]
    assert lines == [
        "step 999/9999  3:53:20  waits for the endpoints' proof 1:56:40  left 128 d 13 h",
        "groups 1020/1024  trained 1000  in flight 16384  scoring 8192  eval 1200/2000",
        # the one line that may be cut off
        f"writes a checkpoint  down: {MOST.endpoints_down[0]} and 2 more"[:80],
    ]
    assert max(map(len, screen(terminal))) <= 80
    view.close()


def test_without_a_terminal_only_long_steps_are_told_of(clock):
    stream = io.StringIO()
    view = ConsoleView(total_steps=60, stream=stream)
    for step in (1, 2):  # short ones
        clock.now_s += 29
        view.show(FEW)
        view.log(step, STEP)
    told_at_s = []
    for second in range(1, 100):
        before = len(stream.getvalue())
        clock.now_s += 1
        view.show(FEW)
        if len(stream.getvalue()) > before:
            told_at_s.append(second)
    view.log(2, {"eval/accuracy": 0.5})  # of the weights before: the step goes on
    clock.now_s += 1
    view.show(FEW)
    view.log(3, STEP)
    clock.now_s += 29
    view.show(FEW)
    view.close()
    assert told_at_s == [30, 60, 90]
    lines = [line.removeprefix("12:34:56  ") for line in stream.getvalue().splitlines()]
    assert [line.split("  ")[0] for line in lines] == [
        *("step 1/60", "step 2/60", "step 3/60", "step 3/60", "step 3/60", "step 2/60"),
        "step 3/60",
    ]
    assert lines[2] == (
        "step 3/60  30 s  waits for groups 29 s  left 0:38:10"
        "  groups 20/32  trained 12  in flight 96  eval 20/200"
    )
    assert "\x1b" not in stream.getvalue()


def test_progress_is_shown_from_a_thread_until_the_console_is_closed(monkeypatch, terminal):
    monkeypatch.setattr(step_progress, "LOOK_EVERY_S", 0.001)
    looks, third = [], threading.Event()

    def look() -> StepProgress:
        looks.append(threading.current_thread().name)
        if len(looks) == 3:
            third.set()
        return FEW

    view = ConsoleView(total_steps=60, stream=terminal, look=look)
    assert third.wait(60)
    view.log(3, STEP)
    view.close()
    num = len(looks)
    assert set(looks) == {"progress"} and "groups" not in "\n".join(screen(terminal))
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    assert len(looks) == num


def test_a_terminal_that_is_gone_ends_nothing(terminal, caplog):
    view = ConsoleView(total_steps=60, stream=terminal)

    def gone(text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    terminal.write = gone  # type: ignore[method-assign,assignment]
    view.show(FEW)
    view.close()
    assert "the run goes on" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-0.2, "0 s"),
        (119.4, "119 s"),
        (119.6, "0:02:00"),
        (3723, "1:02:03"),
        (86_399, "23:59:59"),
        (100_000, "1 d 3 h"),
    ],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_every_phase_of_the_trainer_has_words():
    """Those that the loop names, and what is outside of all of them."""
    sources = inspect.getsource(loop) + inspect.getsource(accumulation)
    named = set(re.findall(r'clock\.phase\("(\w+)"', sources))
    assert named | {OTHER} == set(DOES)


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    view = ConsoleView(total_steps=60, stream=terminal)
    view.log(1, STEP)
    assert "step 1/60  reward 0.500" in terminal.getvalue() and "\x1b" not in terminal.getvalue()
    view.close()
