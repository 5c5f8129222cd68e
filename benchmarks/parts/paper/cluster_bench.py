"""Sides on a cluster: the trainer through DeepSpeed's launcher, against endpoints that are up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.end_to_end.ours import run_command
from benchmarks.parts.paper.cluster import Cluster
from benchmarks.parts.paper.finished_run import STEP_S, FinishedRun, read_run
from benchmarks.parts.paper.sides import Side
from easyrl.config import Config
from easyrl.config.file import load_config
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.run_files import CONFIG_FILE, METRICS_FILE


@dataclass(frozen=True)
class ClusterBench:
    """A table's configuration on a cluster.

    A run whose folder has all steps is read and not repeated, one that was interrupted goes on.
    """

    cluster: Cluster
    config: Path
    num_steps: int
    settings: Sequence[str] = ()  # of the command line, after all others
    note: str = ""

    def run(self, side: Side, run_dir: Path) -> FinishedRun:
        cluster = self.part_of(side)
        config = self.checked(side, run_dir)
        if self._num_done(run_dir) < self.num_steps:
            hostfile = run_dir.with_suffix(".hosts")
            lines = [f"{trainer.host} slots={trainer.devices}" for trainer in cluster.trainers]
            hostfile.write_text("\n".join(lines) + "\n")
            command = self.command(side, run_dir, hostfile)
            run_command(command, run_dir.with_suffix(".log"), os.environ)
        return read_run(run_dir, config.rollout.num_generations, cluster.devices)

    def part_of(self, side: Side) -> Cluster:
        """Raises ``ConfigError`` if the cluster has no such part."""
        return self.cluster if side.devices is None else self.cluster.part(side.devices)

    def checked(self, side: Side, run_dir: Path) -> Config:
        """The configuration of a side. Raises ``ConfigError``."""
        return load_config(self.config, self.overrides(side, run_dir))

    def overrides(self, side: Side, run_dir: Path) -> list[str]:
        return [
            *self.part_of(side).overrides(),
            f"run.mode={side.mode}",
            f"run.output_dir={run_dir}",
            f"trainer.max_steps={self.num_steps}",
            *side.settings,
            *self.settings,
        ]

    def command(self, side: Side, run_dir: Path, hostfile: Path) -> list[str]:
        """The launcher's command line; with ``--resume`` where the folder has an attempt."""
        goes_on = (run_dir / CONFIG_FILE).exists()
        return [
            *(str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile)),
            *("--module", "easyrl.train", str(self.config)),
            *self.overrides(side, run_dir),
            *(["--resume"] if goes_on else []),
        ]

    def _num_done(self, run_dir: Path) -> int:
        path = run_dir / METRICS_FILE
        return sum(STEP_S in line for line in read_metrics(path)) if path.is_file() else 0
