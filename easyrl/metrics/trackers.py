"""Where metrics go: ``metrics.jsonl`` always, TensorBoard and Weights & Biases by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from easyrl.runtime.durable_files import remedy, write_durably

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A metrics back end."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def note(self, name: str, text: str) -> None:
        """A text about the whole run; a later one of the same name replaces it."""

    def close(self) -> None: ...


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


class TensorBoardTracker:
    """Event files in ``directory``."""

    def __init__(self, directory: Path, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=from_step + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def note(self, name: str, text: str) -> None:
        self._writer.add_text(name, text)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run; needs the extra ``easyrl[wandb]``.

    ``samples``: columns of a table, and what gives a step's rows of it, none where it has none.
    """

    def __init__(
        self,
        project: str,
        name: str,
        directory: Path,
        config: dict[str, Any],
        samples: tuple[Sequence[str], Callable[[int], list[list[Any]]]] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "run.trackers: wandb is not installed; pip install 'easyrl[wandb]'"
            ) from None
        self._samples, self._wandb = samples, wandb
        self._run = wandb.init(project=project, name=name, dir=str(directory), config=config)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)
        if self._samples is not None:
            columns, rows_of = self._samples
            if rows := rows_of(step):
                table = self._wandb.Table(columns=list(columns), data=rows)
                self._run.log({"samples": table}, step=step)

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self) -> None:
        self._run.finish()


class OptionalTracker:
    """A tracker whose failures are told of, each once, and end nothing; called ``name`` there.

    Raises what ``open_tracker`` does, but for a file that cannot be written.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name = name
        self._told: set[str] = set()
        self._tracker: Tracker | None = None
        with self._tolerant(OSError):
            self._tracker = open_tracker()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._tolerant():
            if self._tracker is not None:
                self._tracker.log(step, metrics)

    def note(self, name: str, text: str) -> None:
        with self._tolerant():
            if self._tracker is not None:
                self._tracker.note(name, text)

    def close(self) -> None:
        with self._tolerant():
            if self._tracker is not None:
                self._tracker.close()

    @contextmanager
    def _tolerant(self, kind: type[Exception] = Exception) -> Iterator[None]:
        try:
            yield
        except kind as error:  # of whatever library
            problem = f"{type(error).__name__}: {error}"
            if problem not in self._told:
                logger.warning("%s: %s; the run goes on without it", self._name, problem)
            self._told.add(problem)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics of each step of a ``metrics.jsonl``; its evaluation has a line of its own.

    A damaged line is left out, with a warning.
    """
    steps: dict[int, dict[str, float]] = {}
    for _, metrics in _lines(path):
        step = int(metrics["step"])
        steps[step] = steps.get(step, {}) | metrics
    return list(steps.values())


def _drop_after(path: Path, step: int, *, unevaluated: bool) -> None:
    """Leaves the lines up to ``step``; a kill or a full disk meanwhile loses none of them."""

    def is_kept(metrics: dict[str, float]) -> bool:
        is_again = unevaluated and metrics["step"] == step and "eval/accuracy" in metrics
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
            metrics = orjson.loads(line)
            if not isinstance(metrics["step"], int):
                raise TypeError("step has to be a whole number")
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("%s: line %d is damaged and left out: %s", path, number, error)
            continue
        found.append((line + b"\n", metrics))
    return found
