"""A hit does what it says to a life of several processes, and none of them is overlooked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import chaos_life
from benchmarks.chaos_life import Life

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
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    def start(config, overrides, log, *, num_ranks, **environment):
        assert (config, overrides, num_ranks) == ("config", ["a=b"], 2)
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-c", LAUNCHER],
                env={**os.environ, **environment},
                stdout=file,
                start_new_session=True,
            )

    monkeypatch.setattr(chaos_life, "start_trainer", start)
    (tmp_path / "log").write_text("an earlier life\n")
    life = Life(3, "config", ["a=b"], tmp_path / "log", 2)
    try:
        until(lambda: len(life.members()) == 5)
        yield life
    finally:
        life.kill()


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_killed_leaves_nobody(life):
    assert life.strike("all killed", 0.0) == "all"
    assert life.has_ended and life.launcher.returncode == -signal.SIGKILL
    assert life.said() == "two ranks\n"


@pytest.mark.parametrize(
    ("how", "victim", "what", "left"),
    [
        ("rank killed", 0.9, "rank 1", 4),
        ("rank ended", 0.0, "rank 0", 4),
        ("launcher ended", 0.0, "launcher", 4),
        ("job ended", 0.0, "process group", 2),  # the workers have sessions of their own
    ],
)
def test_a_hit_takes_what_it_names(life, how, victim, what, left):
    ranks = [process.pid for process in life.ranks()]
    assert len(ranks) == 2
    assert life.strike(how, victim) == what
    until(lambda: len(life.members()) == left)
    running = {process.pid for process in life.members()}
    assert (life.launcher.pid in running) == what.startswith("rank")
    if what.startswith("rank"):
        assert [pid in running for pid in ranks] == [what != "rank 0", what != "rank 1"]
    assert not life.has_ended


def test_a_rank_that_is_not_there_is_hit_in_its_launcher(life, monkeypatch):
    monkeypatch.setattr(life, "ranks", list)
    assert life.strike("rank killed", 0.5) == "launcher"
    assert life.launcher.wait(10) == -signal.SIGKILL
