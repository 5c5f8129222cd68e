"""Where metrics go: ``metrics.jsonl`` always, TensorBoard and Weights & Biases by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import orjson


class Tracker(Protocol):
    """A metrics back end."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlTracker:
    """One object per step. When a run resumes at ``from_step``, lines after it are dropped."""

    def __init__(self, path: Path, from_step: int) -> None:
        if path.exists():
            lines = _whole_lines(path)
            kept = [line for line in lines if from_step and orjson.loads(line)["step"] <= from_step]
            path.write_bytes(b"".join(kept))
        self._file = path.open("ab")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(orjson.dumps({"step": step, **metrics}) + b"\n")
        self._file.flush()

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

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All lines of a ``metrics.jsonl``."""
    return [orjson.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[bytes]:
    """Lines with their ends; one that a crash cut off is left out."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
