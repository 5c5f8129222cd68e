"""A tracker that is told metrics by the names of TRL or verl."""

from __future__ import annotations

from easyrl.metrics.names import Names, renamed
from easyrl.metrics.trackers import Tracker


class RenamedTracker:
    """``tracker``, which gets ``names`` for ours."""

    def __init__(self, tracker: Tracker, names: Names) -> None:
        self._tracker, self._names = tracker, names

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._tracker.log(step, renamed(metrics, self._names))

    def note(self, name: str, text: str) -> None:
        self._tracker.note(name, text)

    def close(self) -> None:
        self._tracker.close()
