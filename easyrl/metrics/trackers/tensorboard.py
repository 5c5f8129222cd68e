"""Metrics in TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path


class TensorBoardTracker:
    """Event files in ``directory``, with one event for all metrics of a step."""

    def __init__(self, directory: Path, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=from_step + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)

    def note(self, name: str, text: str) -> None:
        self._writer.add_text(name, text)

    def close(self) -> None:
        self._writer.close()
