"""A hit does what it says to an attempt of several processes, and none of them is overlooked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.parts.chaos import attempt as chaos_attempt
from benchmarks.parts.chaos.attempt import Attempt

# a rank with a worker in a session of its own, as the trainer's servers are
RANK = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
LAUNCHER = f"""
import subprocess, sys, time
for rank in range(2):
    subprocess.Popen([sys.executable, "-c", {RANK!r}, f"--local_rank={{rank}}"])
print("two ranks", flush=True)
time.sleep(600)
"""


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    def start(config, overrides, log, *, num_ranks, **environment):
        assert (config, overrides, num_ranks) == ("config", ["a=b"], 2)
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-c", LAUNCHER],
                env={**os.environ, **environment},
                stdout=file,
                start_new_session=True,
            )

    monkeypatch.setattr(chaos_attempt, "start_trainer", start)
    (tmp_path / "log").write_text("an earlier attempt\n")
    attempt = Attempt(3, "config", ["a=b"], tmp_path / "log", 2)
    try:
        until(lambda: len(attempt.members()) == 5)
        yield attempt
    finally:
        attempt.kill()


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_killed_leaves_nobody(attempt):
    assert attempt.strike("all killed", 0.0) == "all"
    assert attempt.has_ended and attempt.launcher.returncode == -signal.SIGKILL
    assert attempt.said() == "two ranks\n"


@pytest.mark.parametrize(
    ("how", "victim", "what", "left"),
    [
        ("rank killed", 0.9, "rank 1", 4),
        ("rank ended", 0.0, "rank 0", 4),
        ("launcher ended", 0.0, "launcher", 4),
        ("job ended", 0.0, "process group", 2),  # the workers have sessions of their own
    ],
)
def test_a_hit_takes_what_it_names(attempt, how, victim, what, left):
    ranks = [process.pid for process in attempt.ranks()]
    assert len(ranks) == 2
    assert attempt.strike(how, victim) == what
    until(lambda: len(attempt.members()) == left)
    running = {process.pid for process in attempt.members()}
    assert (attempt.launcher.pid in running) == what.startswith("rank")
    if what.startswith("rank"):
        assert [pid in running for pid in ranks] == [what != "rank 0", what != "rank 1"]
    assert not attempt.has_ended


def test_a_rank_that_is_not_there_is_hit_in_its_launcher(attempt, monkeypatch):
    monkeypatch.setattr(attempt, "ranks", list)
    assert attempt.strike("rank killed", 0.5) == "launcher"
    assert attempt.launcher.wait(10) == -signal.SIGKILL
