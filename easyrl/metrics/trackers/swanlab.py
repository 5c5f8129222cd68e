"""Metrics in an experiment of SwanLab."""

from __future__ import annotations

import secrets
import signal
import threading
from pathlib import Path
from typing import Any

from easyrl.metrics.trackers.base import tracker_package
from easyrl.metrics.trackers.ending import RunEnding
from easyrl.metrics.trackers.state import TrackerState

STATES = {"finished": "success", "failed": "crashed", "stopped": "aborted"}


class SwanlabTracker:
    """An experiment of ``project``; needs the extra ``easyrl[swanlab]``.

    A resumed run goes on in it where SwanLab has it: online. Elsewhere it begins a second
    experiment of the same id beside the first. SWANLAB_MODE says which; files lie in
    ``directory``.
    """

    def __init__(
        self,
        project: str,
        name: str,
        directory: Path,
        config: dict[str, Any],
        state: TrackerState,
        ending: RunEnding,
    ) -> None:
        self._ending = ending
        swanlab = tracker_package("swanlab")
        run_id = state.run_id or secrets.token_hex(10)
        interrupt = signal.getsignal(signal.SIGINT)
        self._run = swanlab.init(
            project=project,
            name=name,
            log_dir=str(directory / "swanlab"),
            config=config,
            id=run_id,
            resume="allow",
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # it is the run's: it saves, then ends
        state.keep_run(run_id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def note(self, name: str, text: str) -> None:
        self._run.config.update({name: text})

    def close(self) -> None:
        self._run.finish(STATES[self._ending.state], error=self._ending.problem or None)
