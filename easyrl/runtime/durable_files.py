"""Files that a power cut leaves whole."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(file: Path, text: str) -> None:
    """All of ``text``, or what was there before; also after a power cut."""
    unfinished = file.with_name(f"{file.name}.part")
    with unfinished.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.rename(file)
    fsync_folder(file.parent)


def fsync_folder(folder: Path) -> None:
    """The names in ``folder`` survive the machine going down. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
