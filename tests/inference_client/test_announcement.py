"""What a killed trainer leaves of its weights goes with the next run, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from easyrl.inference_client.transfer.announcement import OWNER, Announcement

TRAINER = """
import sys, time
from pathlib import Path
from easyrl.inference_client.transfer.announcement import Announcement
announcement = Announcement(Path(sys.argv[1]), "other")
print("announced", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("host", ["ours", "another"])
def test_roots_of_killed_trainers_are_removed(tmp_path: Path, host: str) -> None:
    other = tmp_path / "easyrl-other"
    command = [sys.executable, "-c", TRAINER, str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"announced\n"
        first = Announcement(tmp_path / "easyrl-first", "first")
        assert other.is_dir()  # its trainer lives
        trainer.kill()
    if host == "another":  # whose locks may not be seen here
        (other / OWNER).write_text("elsewhere")
    (tmp_path / "easyrl-unknown").mkdir()
    second = Announcement(tmp_path / "easyrl-second", "second")
    assert other.exists() == (host == "another")
    assert first.root.is_dir() and (tmp_path / "easyrl-unknown").is_dir()
    first.remove()
    second.remove()
    second.remove()
    assert not first.root.exists() and not second.root.exists()
