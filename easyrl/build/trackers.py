"""Where a run's metrics go."""

from __future__ import annotations

from pathlib import Path

from easyrl.config import Config
from easyrl.metrics.console import ConsoleView
from easyrl.metrics.trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker
from easyrl.runtime.run_files import METRICS_FILE


def open_trackers(
    config: Config, output: Path, from_step: int, total_steps: int | None
) -> list[Tracker]:
    """All back ends that the configuration names; their figures go on after ``from_step``."""
    trackers: list[Tracker] = [JsonlTracker(output / METRICS_FILE, from_step)]
    if "tensorboard" in config.run.trackers:
        trackers.append(TensorBoardTracker(output / "tensorboard", from_step))
    if "wandb" in config.run.trackers:
        plain = config.model_dump(mode="json")
        trackers.append(WandbTracker(config.run.wandb_project, config.run.name, output, plain))
    if config.run.console:
        trackers.append(ConsoleView(total_steps))
    return trackers
