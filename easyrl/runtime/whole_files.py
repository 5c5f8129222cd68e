"""Files that are there whole or not at all, also after a kill; only a power cut can damage one.

A file takes its name when all of it is written, so what is written again replaces what was there.
Nothing is synced: ``durable_files`` is for what a run depends on.
"""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

UNFINISHED = ".part"  # behind the name of a file that is being written
LEVEL = 1  # of gzip: three times as fast as its default, files a tenth larger
T = TypeVar("T")


def write_whole(file: Path, content: bytes) -> None:
    """In place of what there was. Raises ``OSError``."""
    unfinished = file.with_name(file.name + UNFINISHED)
    unfinished.write_bytes(content)
    unfinished.rename(file)


def write_compressed(file: Path, content: bytes) -> None:
    """The same, with gzip."""
    write_whole(file, gzip.compress(content, LEVEL, mtime=0))


def read_compressed(file: Path, decode: Callable[[bytes], T]) -> T | None:
    """What ``decode`` makes of a compressed file; None if it is gone.

    One that is damaged, so that ``decode`` raises ``ValueError``, is None too, with a warning: for
    files that nothing depends on.
    """
    try:
        content = file.read_bytes()
        if not content:  # gzip takes it for a file of nothing
            raise EOFError("it is empty")
        return decode(gzip.decompress(content))
    except FileNotFoundError:  # the run has removed it meanwhile
        return None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        logger.warning(
            "%s: cannot be read and is left out (%s: %s); remove it, nothing depends on it",
            file,
            type(error).__name__,
            error,
        )
        return None
