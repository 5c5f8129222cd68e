"""Where metrics go: ``metrics.jsonl`` always, TensorBoard and Weights & Biases by name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from easyrl.runtime.durable_files import write_durably


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
                f"the metrics of step {step} cannot be written ({error.strerror}); make room or "
                "give permission and go on with --resume"
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
    """A Weights & Biases run; needs the extra ``easyrl[wandb]``."""

    def __init__(self, project: str, name: str, directory: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "run.trackers: wandb is not installed; pip install 'easyrl[wandb]'"
            ) from None
        self._run = wandb.init(project=project, name=name, dir=str(directory), config=config)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics of each step of a ``metrics.jsonl``; its evaluation has a line of its own."""
    steps: dict[int, dict[str, float]] = {}
    for line in map(orjson.loads, _whole_lines(path)):
        steps[line["step"]] = steps.get(line["step"], {}) | line
    return list(steps.values())


def _drop_after(path: Path, step: int, *, unevaluated: bool) -> None:
    """Leaves the lines up to ``step``; a kill or a full disk meanwhile loses none of them."""

    def is_kept(line: dict[str, float]) -> bool:
        is_again = unevaluated and line["step"] == step and "eval/accuracy" in line
        return line["step"] <= step and not is_again

    lines = _whole_lines(path)
    kept = [line for line in lines if is_kept(orjson.loads(line))]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))
        return
    write_durably(path, b"".join(kept).decode())


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _whole_lines(path: Path) -> list[bytes]:
    """Lines with their ends; one that a crash cut off is left out."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
