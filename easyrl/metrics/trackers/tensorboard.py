"""Metrics in TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path


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
