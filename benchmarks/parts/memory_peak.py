"""Peak memory of a run's processes, from the kernel's own high-water marks."""

from __future__ import annotations

from pathlib import Path

import psutil


class MemoryPeak:
    """The largest sum, over the processes alive at a look, of each one's largest resident set.

    Marks do not miss what comes and goes between two looks. A process counts from its second look
    on: between fork and exec a child shows its parent's memory.

    Attributes:
        peak_mb: of all attempts.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._seen: set[int] = set()

    def look(self, processes: list[psutil.Process]) -> None:
        marks = {process.pid: _high_water_kb(process.pid) for process in processes}
        known = sum(mark for pid, mark in marks.items() if pid in self._seen)
        self._seen = set(marks)
        self.peak_mb = max(self.peak_mb, known / 1024)


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and what it has started, directly or not."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _high_water_kb(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    except OSError:
        pass  # it has ended
    return 0
