"""What a killed trainer leaves of its weights goes with the next run, and nothing else does."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from easyrl.inference_client.transfer.announcement import OWNER, Announcement
from easyrl.runtime.small_files import read_small

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


CLEANER = """
import resource, sys
from pathlib import Path
from easyrl.inference_client.transfer.announcement import Announcement
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
Announcement(Path(sys.argv[1]), "mine").remove()
print("done")
"""


@pytest.mark.parametrize("kind", ["sparse", "pipe", "link"])
def test_what_a_stranger_calls_an_owner_is_neither_read_whole_nor_waited_for(tmp_path, kind):
    """Anybody may write beside us in shared memory."""
    owner = tmp_path / "easyrl-stranger" / OWNER
    owner.parent.mkdir()
    if kind == "sparse":
        with owner.open("wb") as file:
            file.truncate(2**36)
    elif kind == "pipe":
        os.mkfifo(owner)
    else:
        owner.symlink_to("/dev/zero")
    command = [sys.executable, "-c", CLEANER, str(tmp_path / "easyrl-mine")]
    cleaned = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert cleaned.stdout == "done\n", cleaned.stderr[-2000:]
    assert owner.parent.is_dir()


def test_a_small_file_is_read_within_its_bound(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"1234")
    assert read_small(file, 4) == b"1234"
    with pytest.raises(OSError, match="more than 3 bytes") as refused:
        read_small(file, 3)
    assert refused.value.errno == errno.EFBIG
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_small(tmp_path / "pipe", 3)


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
