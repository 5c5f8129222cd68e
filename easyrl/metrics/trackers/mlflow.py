"""Metrics in a run of MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from easyrl.config.secrets import dotted, leaves
from easyrl.metrics.trackers.base import tracker_package
from easyrl.metrics.trackers.ending import RunEnding
from easyrl.metrics.trackers.state import TrackerState

FILE = "mlflow.db"  # in the run's folder, where no server is named
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MOST_CHARACTERS = 6000  # of a parameter
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # of one request


class MlflowTracker:
    """A run of the experiment ``project``; needs the extra ``easyrl[mlflow]``.

    It is on the server that MLFLOW_TRACKING_URI names, else in a file of ``directory``. Parameters
    are the configuration with which the run began. A name's characters that MLflow has none of are
    ``_`` there: ``eval/avg_8``.
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
        self._mlflow = tracker_package("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.resolve() / FILE}"
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if state.run_id is not None:
            self._run_id = state.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = (
            self._client.create_experiment(project)
            if experiment is None
            else experiment.experiment_id
        )
        self._run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        state.keep_run(self._run_id)
        self._log_parameters(config)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        entries = [
            self._mlflow.entities.Metric(mlflow_name(metric), value, now_ms, step)
            for metric, value in metrics.items()
        ]
        for some in _parts(entries, MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def note(self, name: str, text: str) -> None:
        self._client.set_tag(self._run_id, name, text)

    def close(self) -> None:
        self._client.set_terminated(self._run_id, status=STATUSES[self._ending.state])

    def _log_parameters(self, config: dict[str, Any]) -> None:
        entries = [
            self._mlflow.entities.Param(mlflow_name(dotted(path)), str(value)[:MOST_CHARACTERS])
            for path, value in leaves(config)
        ]
        for some in _parts(entries, MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=some)


def mlflow_name(name: str) -> str:
    """``name`` with what MLflow takes for metrics and parameters."""
    return re.sub(r"[^\w./ :-]", "_", name)


def _parts(entries: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(entries), size):
        yield list(entries[start : start + size])
