"""Which of a run's numbered files are as they were: those of the timeline, and samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[tuple[str, int, int], ...]  # name, time, bytes of each rank's file


def stamps(files: Iterable[tuple[int, Path]]) -> dict[int, Stamp]:
    """By the number of batch or step, in order; two that are equal are of the same ``files``."""
    found: dict[int, list[tuple[str, int, int]]] = {}
    for number, path in files:
        try:
            stat = path.stat()
        except FileNotFoundError:  # the run has removed it meanwhile
            continue
        found.setdefault(number, []).append((path.name, stat.st_mtime_ns, stat.st_size))
    return {number: tuple(sorted(found[number])) for number in sorted(found)}
