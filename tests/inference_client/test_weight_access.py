"""Who may read the weights on their way: file modes, and what another Unix user is told."""

from __future__ import annotations

import encodings.idna  # noqa: F401 (loaded at first use, which another user could not)
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.transfer.access import GROUP
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.artifact import remove_artifact, write_artifact
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from easyrl.inference_client.vllm_plugin.easyrl_vllm.receiving import WeightReceiver

WEIGHTS = {name: torch.randn(50) for name in ("a", "b", "c")}
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of shared memory that everybody can look into, as /dev/shm is."""
    folder = Path(tempfile.mkdtemp(prefix="easyrl-test-access-", dir=SHARED_MEMORY))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def another_user(*, group: int = NOBODY) -> Iterator[None]:
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(group)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def write(told: Announcement, name: str) -> list[dict]:
    chunks = write_artifact(
        WEIGHTS.items(), told.root / name, "v", 400, memory=told.memory, access=told.access
    )
    return [chunk.describe() for chunk in chunks]


def modes(root: Path) -> dict[str, int]:
    paths = [root, *root.rglob("*")]
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_whatever_the_umask(memory: Path, mask: int) -> None:
    with umask(mask):
        told = Announcement(memory / "easyrl-run", "run")
        write(told, "v1")
        remove_artifact(told.root / "v1", told.memory)  # its files wait for their next use
        write(told, "v2")
    found = modes(told.root)
    assert found["."] == found["v2"] == 0o700
    assert len([name for name in found if name.startswith("v2/chunk-")]) > 1
    assert {mode for name, mode in found.items() if not (told.root / name).is_dir()} == {0o600}
    assert not any(mode & 0o007 for mode in found.values())


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_group_may_read_but_not_write(memory: Path, mask: int) -> None:
    with umask(mask):
        told = Announcement(memory / "easyrl-run", "run", GROUP)
        write(told, "v1")
    found = modes(told.root)
    assert found["."] == found["v1"] == 0o750
    assert found["announcement"] == found["v1/chunk-00000.safetensors"] == 0o640
    assert not any(mode & 0o027 for mode in found.values())


@as_root
def test_another_user_is_refused_with_the_remedy_and_served_over_http(memory: Path) -> None:
    told = Announcement(memory / "easyrl-run", "run")
    chunks = write(told, "v1")
    server = ChunkServer(told.root, told.token)
    try:
        with another_user():
            message = "for this server's Unix user .*weight_sync.access=group.*transport=http"
            with pytest.raises(ValueError, match=message):
                WeightReceiver(told.init_info("file"))
            receiver = WeightReceiver(told.init_info("auto", server.url))
            assert receiver.transport == "http"
            found = {name: w.clone() for name, w in receiver.tensors("v1", chunks)}
            receiver.close()
    finally:
        server.close()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


@as_root
def test_a_user_of_the_group_reads_the_files(memory: Path) -> None:
    told = Announcement(memory / "easyrl-run", "run", GROUP)
    chunks = write(told, "v1")
    with another_user(group=os.getgid()):
        receiver = WeightReceiver(told.init_info("file"))
        found = {name: w.clone() for name, w in receiver.tensors("v1", chunks)}
        receiver.close()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


@as_root
def test_roots_of_other_users_are_no_obstacle(memory: Path) -> None:
    memory.chmod(0o777)
    Announcement(memory / "easyrl-of-root", "run")
    with another_user():
        Announcement(memory / "easyrl-of-nobody", "run").remove()
    assert (memory / "easyrl-of-root").is_dir() and not (memory / "easyrl-of-nobody").exists()
