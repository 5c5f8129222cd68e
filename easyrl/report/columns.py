"""Metrics over the steps as the report reads them: a column for each."""

from __future__ import annotations

import logging
import math
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any

from easyrl.metrics.trackers.jsonl import metrics_of_line
from easyrl.report.growing_file import GrowingFile

logger = logging.getLogger(__name__)


class Column:
    """One metric: the steps that have it, in order, and its values."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        """In place of what there was of ``step``."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        place = bisect_left(self.steps, step)
        if self.steps[place] == step:
            self.values[place] = value
        else:
            self.steps.insert(place, step)
            self.values.insert(place, value)


class MetricsFile:
    """A ``metrics.jsonl`` that grows; what is not finite, null in the file, is left out.

    An evaluation has a line of its own under its step. A damaged line is left out, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self.columns: dict[str, Column] = {}  # by name
        self.last_step: int | None = None  # None: nothing was reported yet
        self._path = path
        self._file = GrowingFile(path, self._forget, self._add)

    def read_on(self) -> None:
        """What was written since the last time. Raises ``OSError``."""
        self._file.read_on()

    def add(self, row: dict[str, Any]) -> None:
        """A line's metrics, its step among them."""
        step = row["step"]
        self.last_step = max(step, step if self.last_step is None else self.last_step)
        for name, value in row.items():
            if is_number(value) and name != "step":
                if name not in self.columns:
                    self.columns[name] = Column()
                self.columns[name].add(step, value)

    def _forget(self) -> None:
        self.columns, self.last_step = {}, None

    def _add(self, line: bytes) -> None:
        try:
            self.add(metrics_of_line(line))
        except ValueError as error:
            logger.warning("%s: a line is damaged and left out: %s", self._path, error)


def is_number(value: object) -> bool:
    """Whether a metric can be drawn: in a file of JSON what is not finite is null."""
    return isinstance(value, int | float) and math.isfinite(value)
