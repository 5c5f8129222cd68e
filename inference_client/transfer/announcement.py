"""The artifact folder's announcement: an identity file by which endpoints recognise it.

``ROOT`` holds the artifacts of one run, and in ``announcement`` the blake3 hash of the run's token:
a receiver that finds it knows that it sees the trainer's own directory, not another machine's.

``owner`` in it names the host and is locked while the trainer lives, however that ends: a root
whose lock is free was left by one that was killed, and the next run on this host removes it. No
other root is ever removed: a run that finds one under its own name takes another name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from easyrl.inference_client.transfer.access import OWNER as OWNER_ALONE
from easyrl.inference_client.transfer.access import Access
from easyrl.inference_client.transfer.artifact import ReusedMemory
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import is_memory
from easyrl.inference_client.vllm_plugin.easyrl_vllm.reading import ANNOUNCEMENT
from easyrl.runtime.small_files import open_small

OWNER = "owner"  # file in the root
ROOTS = "easyrl-*"  # names of runs' roots


class Announcement:
    """Where one run's artifacts are: makes a root, empty, and announces it with a new token.

    The root is ``root``, or its name with a number behind it where that may be another trainer's.
    Roots beside it that killed trainers of this host left are removed. ``memory`` is for
    ``write_artifact`` below the root, as is ``access``. Raises ``OSError`` if it cannot be written.
    """

    def __init__(self, root: Path, run: str, access: Access = OWNER_ALONE) -> None:
        self.run = run
        self.access = access
        self.root = _make_root(root.absolute(), access)
        self._owner = _own(self.root)
        self.token = secrets.token_urlsafe(32)
        announcement = self.root / ANNOUNCEMENT
        announcement.write_text(blake3(self.token.encode()).hexdigest())
        announcement.chmod(access.file)
        # of folders, only those in memory are worth it
        self.memory = ReusedMemory(self.root) if is_memory(self.root) else None

    def init_info(self, transport: str = "auto", url: str | None = None) -> dict[str, Any]:
        """Body of ``/init_weight_transfer_engine``.

        ``auto`` lets the receiver choose between root and ``url`` (of a ``ChunkServer`` as the
        receiver reaches it), ``file`` and ``http`` name only the one. Raises ``ValueError`` for
        ``http`` without a URL.
        """
        if transport not in ("auto", "file", "http"):
            raise ValueError(f"transport: {transport!r} moves no files; use auto, file or http")
        if transport == "http" and url is None:
            raise ValueError("transport: http needs the URL of a server of the chunks")
        return {
            "run": self.run,
            "token": self.token,
            "root": None if transport == "http" else str(self.root),
            "url": None if transport == "file" else url,
        }

    def remove(self) -> None:
        """Deletes the root with all artifacts; safe to call twice."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._owner.close()


def _make_root(root: Path, access: Access) -> Path:
    """An empty folder that was not there before: ``root``, or else the next of its name."""
    root.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(root.parent)
    others = (root.with_name(f"{root.name}-{number}") for number in count(2))
    for free in chain([root], others):
        with contextlib.suppress(FileExistsError):
            access.make_folder(free)
            return free
    raise AssertionError("there is always another number")


def _own(root: Path) -> IO[str]:
    """Locks ``root`` for as long as this process lives, or the result is open."""
    new = root / f"{OWNER}.new"  # it has its name only with the lock
    owner = new.open("x")
    os.fchmod(owner.fileno(), OWNER_ALONE.file)
    owner.write(socket.gethostname())
    owner.flush()
    with contextlib.suppress(OSError):  # a file system without locks: nobody removes it then
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(root / OWNER)
    return owner


def _remove_abandoned(directory: Path) -> None:
    """Deletes the roots of this host's runs that nobody owns any more."""
    name = socket.gethostname().encode()
    for path in directory.glob(f"{ROOTS}/{OWNER}"):
        # not ours, just removed, or no file: anybody may write beside us in shared memory
        with contextlib.suppress(OSError), open_small(path, writable=True) as owner:
            if owner.read(len(name) + 1) == name:  # locks may not reach other hosts
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it has an owner
                shutil.rmtree(path.parent, ignore_errors=True)
