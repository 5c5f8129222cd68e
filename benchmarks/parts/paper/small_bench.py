"""Sides on this machine: a small random model, the embedded server on one core, training on one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.overlap.runs import OneRank, Workload
from benchmarks.parts.paper.finished_run import FinishedRun, read_run
from benchmarks.parts.paper.sides import Side

CONFIG = "benchmarks/parts/paper/small.yaml"
CORES = 2  # the devices that are counted
WORK = Workload(batch_size=24, min_tokens=128, max_tokens=320)
LARGER = Workload(batch_size=12, min_tokens=64, max_tokens=160, hidden_size=256, num_layers=6)
LONG_PROMPTS = Workload(batch_size=12, prompt_tokens=512, min_tokens=64, max_tokens=64)
WORKLOADS = {"table2": LARGER, "shared_prompt": LONG_PROMPTS}


@dataclass(frozen=True)
class SmallBench:
    """Runs of one workload, whose model and prompts are in ``folder``; the first batch warms up."""

    folder: Path
    work: Workload
    num_steps: int  # that are counted
    settings: tuple[str, ...] = ()  # of the command line
    max_inflight: int = 24
    note: str = ", small"

    def prepare(self) -> None:
        """Writes model and prompts."""
        self.work.write(self.folder, self.num_steps + 1)

    def run(self, side: Side, run_dir: Path) -> FinishedRun:
        """Ends the program if it fails."""
        run_dir.mkdir()
        rank = OneRank(
            self.folder, self.work, config=CONFIG, settings=(*side.settings, *self.settings)
        )
        rank.run(side.mode, run_dir, self.max_inflight, self.num_steps + 1)
        return read_run(run_dir, self.work.num_generations, CORES, skip=1)
