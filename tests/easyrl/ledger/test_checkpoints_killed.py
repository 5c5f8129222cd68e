"""A writer that dies, anywhere, leaves a checkpoint to go on from, the next attempt tidies up."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.easyrl.ledger.checkpoint_fakes import checkpoints, load, save

NUM_KILLS = 30
LARGE = 500_000  # elements: a few milliseconds on disk


class Killed(BaseException):
    """Nobody catches it: the process is gone."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``dying(n)``: the n-th change to the disk and all after it do not happen; n = 0: none."""
    left = -1

    def die_before(function: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return function(*args, **options)

        return wrapped

    for owner, name in (
        (os, "write"),
        (os, "fsync"),
        (os, "rename"),
        (os, "mkdir"),
        (os, "unlink"),
        (os, "rmdir"),
        (shutil, "rmtree"),
        (Path, "rename"),
    ):
        monkeypatch.setattr(owner, name, die_before(getattr(owner, name)))

    def set_left(count: int) -> None:
        nonlocal left
        left = count

    return set_left


def test_death_between_any_two_changes_of_the_disk(tmp_path: Path, dying: Any) -> None:
    """An attempt saves step 3 over steps 1, 2 and an older 3; it dies at each point in turn."""
    seen = set()
    for point in range(1, 100):
        folder = tmp_path / str(point)
        save(folder, 1, 2, 3, keep=3)
        dying(point)
        try:
            save(folder, 3, keep=2)
            break
        except Killed:
            pass
        finally:
            dying(0)
        engine, saved = checkpoints(folder)
        for step in saved.folder.steps():  # each is whole, an older one as well
            assert saved.load_latest(at_most=step) == {"at": step} and engine.step == step
        assert load(folder) == 3
        seen.add(tuple(sorted(path.name for path in folder.iterdir())))
        save(folder, 4, keep=2)
        assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4"]
        assert load(folder) == 4
    assert point > 10, "points are missing"
    assert len(seen) >= 4, seen  # before, while written, between the renames, while removing


def test_all_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of what a power cut could undo; the disk's own cache is not ours to test."""
    events = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        events.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    save(tmp_path / "checkpoints", 1)
    assert events == [
        "fsync rank-00000-of-00001.safetensors",
        "fsync checkpoint.json",
        "fsync step-1.tmp",
        "rename step-1.tmp step-1",
        "fsync checkpoints",
    ]


def endless_attempt(folder: Path, told: Connection) -> None:
    """Saves one step after another; tells each that is on disk."""
    torch.set_num_threads(1)  # OpenMP's other threads did not come along with the fork
    engine, saved = checkpoints(folder, background=True, num_elements=LARGE)
    state = saved.load_latest()
    step = 0 if state is None else state["at"]
    while True:
        step += 1
        engine.step = step
        saved.save(step, {"at": step})
        saved.wait()
        told.send(step)


def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    """What was told to be on disk is loaded, or what came after it; never anything else."""
    rng = random.Random(5)
    reached, unfinished = 0, 0
    for _ in range(NUM_KILLS):
        ours, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside other threads
            attempt = multiprocessing.get_context("fork").Process(
                target=endless_attempt, args=(tmp_path, theirs)
            )
            attempt.start()
        theirs.close()
        try:
            assert ours.poll(20), "the attempt does not save"
            time.sleep(rng.uniform(0, 0.03))
        finally:
            assert attempt.pid is not None
            os.kill(attempt.pid, signal.SIGKILL)
            attempt.join()
        while ours.poll():
            try:
                reached = ours.recv()
            except EOFError:
                break
        unfinished += any(path.suffix == ".tmp" for path in tmp_path.iterdir())
        engine, saved = checkpoints(tmp_path, num_elements=LARGE)
        state = saved.load_latest()
        assert state is not None and state["at"] == engine.step >= reached
    assert unfinished > 0  # some of them were killed in the middle of writing
