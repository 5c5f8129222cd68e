"""Metrics in a run of trackio, in files of this machine or on a Space of the Hugging Face Hub."""

from __future__ import annotations

from typing import Any

from easyrl.metrics.trackers.base import tracker_package
from easyrl.metrics.trackers.state import TrackerState


class TrackioTracker:
    """A run of ``project``; needs the extra ``easyrl[trackio]``."""

    def __init__(
        self, project: str, name: str, config: dict[str, Any], state: TrackerState
    ) -> None:
        self._trackio = tracker_package("trackio")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def note(self, name: str, text: str) -> None:
        pass

    def close(self) -> None:
        self._trackio.finish()
