"""Reuse of shared memory: files of old artifacts become those of new ones.

Taking fresh pages from the system costs more than twice what writing into known ones does, and a
receiver that has such a file mapped reads it at the speed of plain memory.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import Bytes, map_file

FREE = ".free"  # folder in the root


class ReusedMemory:
    """Chunk files of removed artifacts below ``root``, kept for the next ones.

    At most one file of each name is kept, so that no more than one artifact's size lies idle.
    """

    def __init__(self, root: Path) -> None:
        self._free = root / FREE
        self._mapped: dict[int, Bytes] = {}  # by inode
        self._lock = threading.RLock()

    def take(self, file: str, target: Path) -> Bytes | None:
        """Moves a freed file of that name to ``target``; its bytes, to be overwritten."""
        with self._lock:
            try:
                (self._free / file).rename(target)
            except FileNotFoundError:
                return None
            status = target.stat()
            memory = self._mapped.get(status.st_ino)
            if memory is None:
                memory = map_file(target, status.st_size, writable=True)
                self._mapped[status.st_ino] = memory
            return memory

    def forget(self, path: Path) -> None:
        """Deletes ``path``, if it is there."""
        with self._lock:
            if path.exists():
                self._mapped.pop(path.stat().st_ino, None)
                path.unlink()

    def reclaim(self, directory: Path) -> None:
        """Takes an artifact's chunk files and deletes the rest of it."""
        with self._lock:
            if not directory.is_dir():
                return
            self._free.mkdir(exist_ok=True)
            for path in directory.glob("chunk-*"):
                self.forget(self._free / path.name)
                path.rename(self._free / path.name)
            shutil.rmtree(directory, ignore_errors=True)
