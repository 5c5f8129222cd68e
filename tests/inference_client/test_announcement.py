"""What a killed trainer leaves of its weights goes with the next run, and nothing else does."""

from __future__ import annotations

import socket
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


def test_a_root_that_a_living_trainer_holds_is_left_alone(tmp_path: Path) -> None:
    """Two clusters with the same paths, or a copied run folder, resumed beside its original."""
    first = Announcement(tmp_path / "easyrl-run", "run")
    (first.root / "weights").write_text("served")
    second = Announcement(tmp_path / "easyrl-run", "run")
    assert (first.root / "weights").read_text() == "served"
    assert second.root != first.root and second.token != first.token
    second.remove()
    assert first.root.is_dir() and not second.root.exists()
    first.remove()


@pytest.mark.parametrize("left", ["dead", "elsewhere", "unowned"])
def test_of_its_own_name_only_a_dead_trainers_root_is_removed(tmp_path: Path, left: str) -> None:
    root = tmp_path / "easyrl-run"
    root.mkdir()
    if left != "unowned":  # a file system without locks: nobody knows whether it lives
        (root / OWNER).write_text(socket.gethostname() if left == "dead" else "elsewhere")
    (root / "weights").write_text("left")
    told = Announcement(root, "run")
    assert (told.root == root) == (left == "dead")
    assert (root / "weights").exists() == (left != "dead")
    told.remove()
