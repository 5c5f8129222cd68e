"""Metrics in a file of the run's folder, one JSON object per line."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import orjson

from easyrl.runtime.durable_files import remedy, write_durably

logger = logging.getLogger(__name__)


class JsonlTracker:
    """One object per step, and one per evaluation of a step's weights, which comes later.

    Lines after ``from_step`` are dropped: they will come again.

    Args:
        from_step: the last whose metrics are out; -1: none.
        unevaluated: the evaluation of ``from_step`` will come again, too.
    """

    def __init__(self, path: Path, from_step: int, *, unevaluated: bool = False) -> None:
        if path.exists():
            _drop_after(path, from_step, unevaluated=unevaluated)
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Handed to the operating system on return. Raises ``OSError`` naming the file."""
        line = orjson.dumps({"step": step, **metrics}) + b"\n"
        try:
            _write_all(self._file, line)
        except OSError as error:
            with suppress(OSError):  # readers leave half a line out
                self._file.truncate(self._end)
            message = (
                f"the metrics of step {step} cannot be written ({error.strerror}); "
                f"{remedy(error)} and go on with --resume"
            )
            raise OSError(error.errno, message, self._file.name) from error
        self._end += len(line)

    def note(self, name: str, text: str) -> None:
        """Nothing: the file holds numbers, and lies beside what is told of."""

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics of each step of a ``metrics.jsonl``; its evaluation has a line of its own.

    A damaged line is left out, with a warning.
    """
    steps: dict[int, dict[str, float]] = {}
    for _, metrics in _lines(path):
        step = int(metrics["step"])
        steps[step] = steps.get(step, {}) | metrics
    return list(steps.values())


def metrics_of_line(line: bytes) -> dict[str, float]:
    """A line's metrics, its step among them. Raises ``ValueError`` if it is not as written."""
    try:
        metrics: dict[str, float] = orjson.loads(line)
        if not isinstance(metrics["step"], int):
            raise TypeError("step has to be a whole number")
    except (TypeError, KeyError) as error:
        raise ValueError(str(error)) from error
    return metrics


def _drop_after(path: Path, step: int, *, unevaluated: bool) -> None:
    """Leaves the lines up to ``step``; a kill or a full disk meanwhile loses none of them."""

    def is_kept(metrics: dict[str, float]) -> bool:
        is_of_evaluation = any(name.startswith("eval/") for name in metrics)
        is_again = unevaluated and metrics["step"] == step and is_of_evaluation
        return metrics["step"] <= step and not is_again

    kept = b"".join(line for line, metrics in _lines(path) if is_kept(metrics))
    if path.read_bytes().startswith(kept):
        os.truncate(path, len(kept))
        return
    write_durably(path, kept.decode())


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _lines(path: Path) -> list[tuple[bytes, dict[str, float]]]:
    """Lines with their ends, and what they say; one that a crash cut off is left out.

    So is one that is not as it was written: what it said cannot be had again, and a run does not
    depend on it. It is told of.
    """
    found = []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            metrics = metrics_of_line(line)
        except ValueError as error:
            logger.warning("%s: line %d is damaged and left out: %s", path, number, error)
            continue
        found.append((line + b"\n", metrics))
    return found
