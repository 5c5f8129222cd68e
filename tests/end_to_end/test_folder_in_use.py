"""A second process in a run's folder: it waits for the first, is refused, or goes on behind it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyrl.runtime.run_files import ATTEMPT_FILE, CERTIFICATE_FILE, LOCK_FILE
from tests.end_to_end.held_batch import BATCH, HeldBatch
from tests.end_to_end.trainer_run import start_ranks, start_trainer

pytestmark = pytest.mark.runs


@pytest.fixture
def held(served, tmp_path) -> Iterator[HeldBatch]:
    batch = HeldBatch(tmp_path, served.model, served.url)
    yield batch
    batch.close()


def contents(folder: Path) -> dict[Path, bytes]:
    """What each attempt writes for itself, and the account of both.

    Not what the living run goes on writing while it is held: events, metrics, the journal's groups,
    the state of its endpoints.
    """
    files = [*folder.glob("config*.yaml"), *folder.glob("checkpoints/*")]
    files += [
        folder / name for name in (CERTIFICATE_FILE, ATTEMPT_FILE, LOCK_FILE, "endpoints.json")
    ]
    return {file: file.read_bytes() for file in files}


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.05)


def test_a_resume_waits_for_the_attempt_before_it_and_goes_on(held, tmp_path):
    first = held.start()
    before = contents(held.run_dir)
    waiting = tmp_path / "waiting"
    second = start_trainer([*held.command(), "--resume"], waiting)
    try:
        wait_for(f"is in use by process {first.process.pid} on ", waiting)
        assert contents(held.run_dir) == before
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0, held.log.read_text()[-5000:]
        held.proxy.open_gate()
        assert second.wait(90) == 0, waiting.read_text()[-5000:]
    finally:
        second.kill()
        second.wait()
    assert held.trainings() == {index: 1 for index in range(2 * BATCH)}


@pytest.mark.slow
def test_two_ranks_are_refused_while_the_attempt_before_them_goes_on(held, tmp_path):
    first = held.start()
    before, log = contents(held.run_dir), tmp_path / "refused"
    ranks = start_ranks([*held.command("trainer.grace_s=0.5"), "--resume"], log, 2)
    try:
        assert [rank.wait(60) for rank in ranks] == [2, 2], log.read_text()[-5000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = [line for line in log.read_text().splitlines() if line.startswith("easyrl: ")]
    user = f"{held.run_dir} is in use by process {first.process.pid} on "
    assert len(told) == 2 and all(user in line for line in told)
    assert "Traceback" not in log.read_text()
    assert contents(held.run_dir) == before
    assert first.process.poll() is None
