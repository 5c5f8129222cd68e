"""Which of a run's numbered files are as they were: those of the timeline, and samples."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"(?:batch|step)-(\d+)-rank\d+.*\.gz")
Stamp = tuple[tuple[str, int, int], ...]  # name, time, bytes of each rank's file


def stamps(folder: Path) -> dict[int, Stamp]:
    """By the number of batch or step, in order; two that are equal are of the same files."""
    found: dict[int, list[tuple[str, int, int]]] = {}
    if folder.is_dir():
        for entry in os.scandir(folder):
            named = _NAME.fullmatch(entry.name)
            try:
                stat = entry.stat()
            except FileNotFoundError:  # the run has removed it meanwhile
                continue
            if named:
                of_number = found.setdefault(int(named[1]), [])
                of_number.append((entry.name, stat.st_mtime_ns, stat.st_size))
    return {number: tuple(sorted(found[number])) for number in sorted(found)}
