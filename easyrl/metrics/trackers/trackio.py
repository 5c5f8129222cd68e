"""Metrics in a run of trackio: files of this machine, or a Space of the Hugging Face Hub."""

from __future__ import annotations

import secrets
from typing import Any

from easyrl.metrics.trackers.base import tracker_package
from easyrl.metrics.trackers.state import TrackerState


class TrackioTracker:
    """A run of ``project``, which a resumed run goes on in; needs the extra ``easyrl[trackio]``.

    trackio knows its runs by their names, so that this one's has something random behind ``name``.
    Where it writes is trackio's own to say: TRACKIO_DIR, TRACKIO_SPACE_ID.
    """

    def __init__(
        self, project: str, name: str, config: dict[str, Any], state: TrackerState
    ) -> None:
        self._trackio = tracker_package("trackio")
        run_id = state.run_id or f"{name}-{secrets.token_hex(4)}"
        self._run = self._trackio.init(
            project=project,
            name=run_id,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # memory and times are among our own metrics
            auto_log_cpu=False,
        )
        state.keep_run(run_id)
        self._step = 0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
        self._step = step

    def note(self, name: str, text: str) -> None:
        self._run.log({name: self._trackio.Markdown(text)}, step=self._step)

    def close(self) -> None:
        self._trackio.finish()
