"""Files in shared memory that are written again and again, mapped once.

The first look at a mapped page costs more than copying it: a mapping pays only if it stays. It
also keeps the memory of a deleted file: those of files that are gone are looked for now and then.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]  # [number of bytes]

MOUNTS = Path("/proc/self/mountinfo")  # linux, man 5 proc
SWEEP_INTERVAL_S = 15.0


class MappedFiles:
    """Mappings of the files below ``root``, read only, each made when a file is met again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._met: set[int] = set()  # inodes that were read once
        self._mapped: dict[int, Bytes] = {}  # by inode, which the mapping keeps from being reused
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sweeper: threading.Thread | None = None

    def memory_of(self, descriptor: int) -> Bytes | None:
        """The file's bytes; None if it is met for the first time or has another size than then."""
        status = os.fstat(descriptor)
        with self._lock:
            memory = self._mapped.get(status.st_ino)
            if memory is None and status.st_ino in self._met and status.st_size:
                memory = map_file(Path(f"/proc/self/fd/{descriptor}"), status.st_size)
                self._mapped[status.st_ino] = memory
                if self._sweeper is None:
                    self._sweeper = threading.Thread(
                        target=self._keep_sweeping, name="easyrl-weights-sweeper", daemon=True
                    )
                    self._sweeper.start()
            self._met.add(status.st_ino)
        return memory if memory is not None and len(memory) == status.st_size else None

    def sweep(self) -> None:
        """Lets go of files that are not below the root any more."""
        entries = _entries(self._root)
        for folder in [entry.path for entry in entries if entry.is_dir()]:
            entries += _entries(folder)
        there = {entry.inode() for entry in entries}
        with self._lock:
            self._met &= there
            for inode in self._mapped.keys() - there:
                del self._mapped[inode]

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._mapped.clear()

    def _keep_sweeping(self) -> None:
        while not self._closed.wait(SWEEP_INTERVAL_S):
            self.sweep()


def map_file(path: Path, num_bytes: int, *, writable: bool = False) -> Bytes:
    """The first ``num_bytes`` of a file as memory; keeps no file descriptor."""
    data = torch.from_file(str(path), shared=writable, size=num_bytes, dtype=torch.uint8)
    return data.numpy()


def is_memory(path: Path) -> bool:
    """Whether ``path`` is in a file system that lives in memory; False where that is unknown."""
    try:
        device = os.stat(path).st_dev
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(
        line.split()[2] == number and line.split(" - ")[1].split()[0] in ("tmpfs", "ramfs")
        for line in lines
    )


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:  # it is gone
        return []
