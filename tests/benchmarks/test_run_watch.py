"""The watch over a run sees progress as it is written, and a run that only keeps busy as stuck."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.parts import run_watch
from benchmarks.parts.run_watch import RunStuck, RunWatch
from easyrl.metrics.event_log import EventLog


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events-rank0.jsonl")


def watching(tmp_path: Path, patience_s: float = 60.0) -> RunWatch:
    (tmp_path / "trainer.log").touch()
    return RunWatch(tmp_path, tmp_path / "trainer.log", patience_s)


def test_steps_are_counted_as_they_are_written(tmp_path: Path, log: EventLog) -> None:
    watch = watching(tmp_path)
    watch.look()
    assert (watch.num_batches, watch.num_steps) == (0, 0)
    log.record("batch_dispatched", version="r:0:0")
    watch.look()
    log.record("step", step=1)
    with (tmp_path / "events-rank0.jsonl").open("ab") as file:
        file.write(b'{"t": %f, "event": "st' % time.monotonic())
        file.flush()
        watch.look()
        file.write(b'ep"}\n')
    assert (watch.num_batches, watch.num_steps) == (1, 1)
    watch.look()
    assert watch.num_steps == 2


@pytest.mark.parametrize("has_read_all", [True, False])
def test_a_log_whose_end_is_cut_off_is_followed_on(
    tmp_path: Path, log: EventLog, has_read_all: bool
) -> None:
    watch = watching(tmp_path)
    log.record("step", step=1)
    log.record("step", step=2)
    if has_read_all:
        watch.look()
    log.close()
    os.truncate(path := tmp_path / "events-rank0.jsonl", path.stat().st_size - 7)
    watch.look()
    EventLog(path).record("step", step=3)
    watch.look()
    assert watch.num_steps == 2 + has_read_all


def test_events_that_are_no_progress_do_not_hide_a_stuck_run(tmp_path: Path, log: EventLog) -> None:
    watch = watching(tmp_path, patience_s=0.3)
    for _ in range(4):
        log.record("endpoint_down")
        time.sleep(0.05)
        watch.look()
    log.record("response_scored")
    watch.look()
    with pytest.raises(RunStuck, match="nothing was done for"):
        for _ in range(10):
            log.record("endpoint_down")
            time.sleep(0.05)
            watch.look()


def test_the_dump_shows_where_every_thread_is(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_watch, "DUMP_WAIT_S", 0.5)
    watch = watching(tmp_path)
    log.record("sync_start", version="r:0:3")
    watch.look()
    hangs = "    print('here', flush=True)\n    time.sleep(60)\n"
    code = f"import time\ndef hangs_here():\n{hangs}hangs_here()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with (tmp_path / "trainer.log").open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-c", start],
            stdout=subprocess.PIPE,
            stderr=output,
            env={"PYTHONFAULTHANDLER": "1"},
        )
    try:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"here\n"
        dump = watch.dump(launcher)
    finally:
        launcher.kill()
        launcher.wait()
    assert "sync_start" in dump and "in hangs_here" in dump
