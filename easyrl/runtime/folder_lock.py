"""A run's folder belongs to one process at a time, for as long as that lives."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from easyrl.config import ConfigError
from easyrl.runtime.run_files import LOCK_FILE

logger = logging.getLogger(__name__)

POLL_S = 0.2
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system that has none


@contextmanager
def locked_folder(folder: Path, patience_s: float) -> Iterator[None]:
    """Inside, ``folder`` is this process's; it is given up when the process ends in whatever way.

    The kernel holds the lock for the open file, which no child process inherits. The file stays
    behind: if it was removed, two processes could each hold a lock on a file of its name.

    Args:
        patience_s: how long another process is waited for; one that was asked to stop needs some
            time.

    Raises ``ConfigError`` naming the other process if it holds the folder longer than that, and
    ``OSError`` where nothing can be written.
    """
    # closed when a child process starts (os.open sees to it)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait(folder, descriptor, patience_s)
        yield
    finally:
        os.close(descriptor)


def _wait(folder: Path, descriptor: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    told = False
    while not _try(folder, descriptor):
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"run.output_dir: {folder} is in use by {_holder(descriptor)}, for more than "
                f"the {patience_s:g} s (trainer.grace_s) that this one has waited; end it, or "
                "name another folder"
            )
        if not told:
            logger.warning(
                "%s is in use by %s; waiting up to %g s (trainer.grace_s) for its end",
                folder,
                _holder(descriptor),
                patience_s,
            )
            told = True
        time.sleep(POLL_S)


def _try(folder: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "%s: this file system has no locks (%s); make sure that no other process runs in "
            "the folder",
            folder,
            error.strerror,
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def _holder(descriptor: int) -> str:
    """For people: who wrote the file last."""
    text = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
    return f"process {text}" if text else "another process"
