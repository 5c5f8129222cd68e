"""A run's own setting, from its folder, and how well its simulation is what its batches took."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from easyrl.config import Config
from easyrl.config.file import load_config
from easyrl.metrics.trackers.jsonl import read_metrics
from easyrl.runtime.run_files import CONFIG_FILE, METRICS_FILE, file_of_run
from easyrl.simulation.calibrate import calibrate, has_episodes, most_in_flight
from easyrl.simulation.replay import replayed
from easyrl.simulation.setting import Setting
from easyrl.timeline.reading import kept_batches, read_batch
from easyrl.timeline.spans import BatchSpans


class Measured(NamedTuple):
    """A run's setting, what its batches took, and what each takes when it is simulated itself."""

    setting: Setting
    num_batches: int
    median_s: float
    mean_s: float
    replayed_median_s: float
    replayed_mean_s: float

    def told(self) -> str:
        median_s, mean_s = self.replayed_median_s, self.replayed_mean_s
        return (
            f"the run: {self.num_batches} batches, {self.median_s:.2f} s in the median and "
            f"{self.mean_s:.2f} in the mean; simulated one by one, each with its own lengths: "
            f"{median_s:.2f} ({median_s / self.median_s - 1:+.1%}) and "
            f"{mean_s:.2f} ({mean_s / self.mean_s - 1:+.1%})\n"
            "below: the mean of batches that are drawn from all lengths"
        )


def measure_run(run_dir: Path) -> tuple[Config, Measured]:
    """Calibrated on the timeline of ``run_dir``, without its first batch and its last.

    Raises ``ValueError`` for a run that is not one prompt and one response a sample, or too short.
    """
    config = load_config(file_of_run(run_dir, CONFIG_FILE), to_look_back=True)
    if config.source != "rollouts":
        raise ValueError(f"{run_dir}: is a run on records; no endpoint is part of it")
    numbers = kept_batches(run_dir)
    batches = [read_batch(run_dir, number) for number in numbers[1:-1] or numbers]
    batches = [of_ranks for of_ranks in batches if of_ranks]
    if not batches:
        raise ValueError(f"{run_dir}: has no timeline to calibrate on (timeline.keep)")
    if config.environments or any(map(has_episodes, batches)):
        raise ValueError(
            f"{run_dir}: its samples are episodes (environments), and what is simulated is one "
            "request for each sample; easyrl trace shows where their time goes"
        )
    setting = _setting(config, batches)
    per_endpoint = _devices_per_endpoint(config, run_dir, setting)
    setting = replace(setting, devices_per_endpoint=per_endpoint)
    both = replayed(batches, setting)
    return config, Measured(
        setting,
        num_batches=len(both),
        median_s=statistics.median(each.measured_s for each in both),
        mean_s=statistics.mean(each.measured_s for each in both),
        replayed_median_s=statistics.median(each.simulated_s for each in both),
        replayed_mean_s=statistics.mean(each.simulated_s for each in both),
    )


def _setting(config: Config, batches: list[list[BatchSpans]]) -> Setting:
    places = config.inference.max_inflight
    return calibrate(
        batches,
        # the limit of auto follows what is measured
        places=most_in_flight(batches) if places == "auto" else int(places),
        batch_size=config.trainer.batch_size,
        group_size=config.rollout.num_generations,
        mode=config.run.mode,
        shares_prompts=config.trainer.packing != "none",
        devices_per_rank=config.parallel.ranks_per_model,
    ).setting


def _devices_per_endpoint(config: Config, run_dir: Path, setting: Setting) -> int:
    """As configured, or as the servers have told the run, which counted them."""
    if (stated := config.inference.devices_per_endpoint) is not None:
        return stated
    metrics = run_dir / METRICS_FILE
    rows = read_metrics(metrics) if metrics.is_file() else []
    counted = [row["throughput/devices"] for row in rows if row.get("throughput/devices")]
    if counted:
        training = setting.ranks * setting.devices_per_rank
        # servers on unequal numbers: what they have in the mean
        return max(round((statistics.mode(counted) - training) / setting.endpoints), 1)
    launch = config.inference.launch
    return launch.tensor_parallel if launch and not config.inference.endpoints else 1
