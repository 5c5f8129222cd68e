"""A run's folder belongs to one process at a time, for as long as that lives."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from easyrl.config import ConfigError
from easyrl.runtime.run_files import LOCK_FILE

logger = logging.getLogger(__name__)

POLL_S = 0.2
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system that has none


class FolderLock:
    """Held from its making until ``close``, or until the process ends in whatever way.

    The kernel holds it for the open file, which no child process inherits. The file stays behind:
    if it was removed, two processes could each hold a lock on a file of its name.

    Args:
        patience_s: how long another process is waited for; one that was asked to stop needs some
            time.

    Raises ``ConfigError`` naming the other process if it holds the folder longer than that, and
    ``OSError`` where nothing can be written.
    """

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._folder = folder
        # closed when a child process starts (os.open sees to it)
        self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._wait(patience_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the folder up. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        told = False
        while not self._try():
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"run.output_dir: {self._folder} is in use by {self._holder()}, for more than "
                    f"the {patience_s:g} s (trainer.grace_s) that this one has waited; end it, or "
                    "name another folder"
                )
            if not told:
                logger.warning(
                    "%s is in use by %s; waiting up to %g s (trainer.grace_s) for its end",
                    self._folder,
                    self._holder(),
                    patience_s,
                )
                told = True
            time.sleep(POLL_S)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.warning(
                "%s: this file system has no locks (%s); make sure that no other process runs in "
                "the folder",
                self._folder,
                error.strerror,
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return True

    def _holder(self) -> str:
        """For people: who wrote the file last."""
        text = os.pread(self._descriptor, 256, 0).decode(errors="replace").strip()
        return f"process {text}" if text else "another process"
