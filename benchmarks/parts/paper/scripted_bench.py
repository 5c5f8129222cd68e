"""Sides of other numbers of devices on this machine: all of them sleep instead of computing.

Two cores do not become faster by being more. Eight devices of inference are an endpoint that sleeps
a set time for each token (``parts/overlap/endpoint.py``); eight of training are micro-batches that
sleep a set time for each of theirs, twice as many half of it. The loop, the producer, the queue,
packing, the weights' push and a small model's own training are real.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.parts.accounting.runs import WORK as SLEEPING_WORK
from benchmarks.parts.end_to_end.ours import run_command
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.paper.finished_run import FinishedRun, read_run
from benchmarks.parts.paper.sides import Side
from benchmarks.parts.paper.small_bench import CONFIG
from easyrl.demo.build_model import build_tokenizer

WORK = replace(SLEEPING_WORK, batch_size=32)
DEVICES = 16  # that one endpoint and the slowest training stand for
PLACES = 16  # requests in flight at an endpoint
GENERATION_S = 10e-3  # of a response's token
TRAINING_S = 0.45e-3  # of a trained token


@dataclass(frozen=True)
class ScriptedBench:
    """Runs of one workload, whose model and prompts are in ``folder``; the first batch warms up."""

    folder: Path
    num_steps: int  # that are counted
    urls: Sequence[str]  # of endpoints that sleep
    settings: tuple[str, ...] = ()  # of the command line
    note: str = ", scripted"

    def prepare(self) -> None:
        """Writes model and prompts."""
        WORK.write(self.folder, self.num_steps + 1)

    def run(self, side: Side, run_dir: Path) -> FinishedRun:
        assert side.devices is not None and side.devices % DEVICES == 0
        times = side.devices // DEVICES
        run_dir.mkdir()
        urls = ",".join(self.urls[:times])
        overrides = WORK.overrides(
            side.mode, self.folder, run_dir, urls, PLACES, self.num_steps + 1
        )
        overrides += [f"weight_sync.{proof}=false" for proof in ("prove", "probe", "canary")]
        module = "benchmarks.parts.paper.scripted_trainer"
        command = [sys.executable, "-m", module, str(TRAINING_S / times), CONFIG]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        run_command(
            [*command, *overrides, *side.settings, *self.settings],
            run_dir / "trainer.log",
            environment,
        )
        return read_run(run_dir, WORK.num_generations, side.devices, skip=1)


def sleeping_endpoints(count: int, opened: ExitStack) -> list[str]:
    """URLs of endpoints that serve until ``opened`` ends."""
    tokenizer = build_tokenizer()
    urls = []
    for _ in range(count):
        endpoint = SleepingEndpoint(len(tokenizer), tokenizer.eos_token_id)
        endpoint.seconds_per_token = GENERATION_S
        urls.append(opened.enter_context(endpoint).url)
    return urls
