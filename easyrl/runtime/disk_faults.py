"""Which errors say that a file which a run has to keep cannot be written or read."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from easyrl.runtime.durable_files import remedy
from easyrl.schema import LedgerError

# A disk's, whatever was being done; others are if they are of a file of the run.
OF_DISKS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
)
_OF_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers: the number is text


@dataclass(frozen=True)
class DiskFault:
    """What a person is told, and whether the same command may succeed later."""

    text: str
    is_temporary: bool


def disk_fault(error: BaseException, folders: Sequence[Path]) -> DiskFault | None:
    """What ``error`` or one of its causes says of the disk; None: it is something else's fault.

    ``folders``: those that the run writes to.
    """
    causes = list(_causes(error))
    os_error = next((e for e in map(_os_error, causes) if e and _is_of_disk(e, folders)), None)
    for cause in causes:
        if isinstance(cause, LedgerError):  # has file and remedy
            return DiskFault(str(cause), cause.is_temporary or os_error is not None)
    return None if os_error is None else DiskFault(_sentence(os_error, folders), True)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Not what was merely being handled: another error then has its own cause."""
    while error is not None:
        yield error
        error = error.__cause__


def _os_error(error: BaseException) -> OSError | None:
    if isinstance(error, OSError):
        return error
    if found := _OF_RUST.search(str(error)):
        number = int(found[1])
        return OSError(number, os.strerror(number))
    return None


def _is_of_disk(error: OSError, folders: Sequence[Path]) -> bool:
    if error.errno in OF_DISKS:
        return True
    if isinstance(error, ConnectionError) or not isinstance(error.filename, str | os.PathLike):
        return False
    file = Path(os.path.abspath(error.filename))
    return any(file.is_relative_to(os.path.abspath(folder)) for folder in folders)


def _sentence(error: OSError, folders: Sequence[Path]) -> str:
    where = error.filename or "a file in " + " or ".join(map(str, folders))
    told, to_do = f"{where}: {error.strerror}", remedy(error)
    return told if to_do in told else f"{told}; {to_do} and go on with --resume"
