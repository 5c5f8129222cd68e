"""Small files that others may have written: opened without waiting, read within bounds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_small(path: Path, *, writable: bool = False) -> BinaryIO:
    """Opens a regular file, unbuffered. Raises ``OSError``, for a pipe or a link too."""
    how = os.O_RDWR if writable else os.O_RDONLY
    descriptor = os.open(path, how | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "r+b" if writable else "rb", 0)


def read_small(path: Path, max_bytes: int) -> bytes:
    """All of ``path``. Raises ``OSError``, with ``EFBIG`` if it has more than ``max_bytes``."""
    with open_small(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return content
