"""A file of lines that a run appends to: read on from where the last look at it ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class GrowingFile:
    """Each whole line goes to ``add`` once.

    A run that goes on with ``--resume`` cuts or replaces such a file: then ``restart`` is called,
    and all of its lines come again.
    """

    def __init__(
        self, path: Path, restart: Callable[[], object], add: Callable[[bytes], object]
    ) -> None:
        self._path, self._restart, self._add = path, restart, add
        self._inode, self._end, self._last = 0, 0, b""  # ... line, which ends at ``_end``

    def read_on(self) -> None:
        """Raises ``OSError``; a file that is not there has no lines."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._begin(0)
            return
        with file:
            if not self._is_as_it_was(file):
                self._begin(os.fstat(file.fileno()).st_ino)
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):  # the run is writing it
                    break
                self._end, self._last = self._end + len(line), line
                self._add(line)

    def _begin(self, inode: int) -> None:
        if self._end:
            self._restart()
        self._inode, self._end, self._last = inode, 0, b""

    def _is_as_it_was(self, file: BinaryIO) -> bool:
        """As far as it was read."""
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._end - len(self._last))
        return file.read(len(self._last)) == self._last
