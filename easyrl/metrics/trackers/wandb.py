"""Metrics in a run of Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from easyrl.metrics.trackers.base import tracker_package
from easyrl.metrics.trackers.ending import RunEnding
from easyrl.metrics.trackers.state import TrackerState

# W&B shows 255 as killed: its own hook says so of Ctrl-C
EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 255}
STEP = "step"  # the axis of all charts: an evaluation comes later than other metrics of its step


class WandbTracker:
    """A Weights & Biases run, which a resumed run goes on in; needs the extra ``easyrl[wandb]``.

    ``samples``: columns of a table, and what gives a step's rows of it, none where it has none.
    """

    def __init__(
        self,
        project: str,
        name: str,
        directory: Path,
        config: dict[str, Any],
        state: TrackerState,
        ending: RunEnding,
        samples: tuple[Sequence[str], Callable[[int], list[list[Any]]]] | None = None,
    ) -> None:
        self._ending = ending
        self._samples, self._wandb = samples, tracker_package("wandb")
        run_id = state.run_id or secrets.token_hex(4)
        self._run = self._wandb.init(
            project=project,
            name=name,
            dir=str(directory),
            config=config,
            id=run_id,
            resume="allow",
            allow_val_change=True,  # of the configuration, by who resumes
        )
        state.keep_run(run_id)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        row: dict[str, Any] = {STEP: step, **metrics}
        if self._samples is not None:
            columns, rows_of = self._samples
            if rows := rows_of(step):
                row["samples"] = self._wandb.Table(columns=list(columns), data=rows)
        self._run.log(row)

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self) -> None:
        self._run.finish(exit_code=EXIT_CODES[self._ending.state])
