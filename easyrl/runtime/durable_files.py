"""Files that a power cut leaves whole."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# What a file system answers that cannot sync what it was asked to, a folder for instance.
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MOVED = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,  # a link that leads nowhere, to who makes a folder
    errno.ELOOP,
    errno.ESTALE,
)

_told: set[int] = set()  # devices whose file system cannot


def write_durably(file: Path, text: str) -> None:
    """All of ``text``, or what was there before; also after a power cut.

    Raises ``OSError`` naming the file and the remedy.
    """
    unfinished = file.with_name(f"{file.name}.part")
    try:
        with unfinished.open("w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            fsync(opened.fileno(), unfinished)
        unfinished.rename(file)
        fsync_folder(file.parent)
    except OSError as error:
        message = f"cannot be written ({error.strerror}); {remedy(error)}"
        raise OSError(error.errno, message, str(file)) from error


def remedy(error: OSError) -> str:
    """What a person can do about a file that cannot be written, in a few words."""
    if error.errno in _FULL:
        return "make room"
    if error.errno in _FORBIDDEN:
        return "give permission to write there"
    if error.errno in _MOVED:
        return "put back the folder or link that was there"
    return "make room or give permission"


def fsync_folder(folder: Path) -> None:
    """The names in ``folder`` survive the machine going down. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor, folder)
    finally:
        os.close(descriptor)


def fsync(descriptor: int, path: Path) -> None:
    """Returns when ``path``, which ``descriptor`` has open, is on the disk.

    A file system that has no such call for it (NFS and FUSE may not, for folders) is told of once
    in the log. Raises ``OSError`` if what was written may be lost.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise
        device = os.fstat(descriptor).st_dev
        if device not in _told:
            _told.add(device)
            logger.warning(
                "%s: its file system cannot sync it (%s); a machine that goes down may lose what "
                "was written last, a process that ends does not",
                path,
                error.strerror,
            )
