"""Runs against endpoints that sleep, with micro-batches that sleep: times that are known."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.overlap.runs import CONFIG, Mode, Workload
from easyrl.runtime.machine import free_port
from easyrl.timeline.reading import kept_batches, read_batch
from easyrl.timeline.spans import BatchSpans

NO_PART = "-"
SECONDS_PER_TOKEN, TRAIN_S = 5e-3, 0.12  # of a response's token, of a micro-batch
TRAIN_TOKEN_S = 2.5e-4  # of a trained token: so long as micro-batches of TRAIN_S, however packed
WORK = Workload(
    batch_size=12,
    num_generations=4,
    min_tokens=40,
    max_tokens=120,
    max_tokens_per_micro_batch=500,
    hidden_size=32,
    num_layers=1,
)


@dataclass(frozen=True)
class SleepingRun:
    """A run of one workload; ``folder`` has its model and prompts."""

    folder: Path
    work: Workload
    urls: Sequence[str]
    num_batches: int
    places: int  # requests in flight at an endpoint
    train_s: float  # that each micro-batch takes
    train_token_s: float = 0.0  # ... and each of its tokens
    num_ranks: int = 1  # data-parallel, which share the places

    def batches(
        self,
        mode: Mode,
        *,
        part: str = NO_PART,
        planted_s: float = 0.0,
        settings: Sequence[str] = (),
    ) -> list[list[BatchSpans]]:
        """The timeline without the first batch, and the last, which has no next one.

        ``settings``: further ones, in which {folder} is that of the workload. ``part``, held up by
        ``planted_s`` in each batch: of ``parts.PARTS``. Ends the program if the run fails.
        """
        with tempfile.TemporaryDirectory(prefix="easyrl-sleeping-") as run:
            run_dir, urls = Path(run), ",".join(self.urls)
            overrides = self.work.overrides(
                mode, self.folder, run_dir, urls, self.places, self.num_batches + 2
            )
            overrides += [f"weight_sync.{proof}=false" for proof in ("prove", "probe", "canary")]
            overrides += [setting.format(folder=self.folder) for setting in settings]
            planted = [part, str(planted_s), str(self.train_s), str(self.train_token_s)]
            module = "benchmarks.parts.accounting.planted"
            command = [*self._start, module, *planted, CONFIG, *overrides]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
            return [read_batch(run_dir, number) for number in kept_batches(run_dir)[1:-1]]

    @property
    def _start(self) -> list[str]:
        """What starts a module: one rank without the launcher."""
        if self.num_ranks == 1:
            return [sys.executable, "-m"]
        launcher = Path(sys.executable).with_name("deepspeed")
        ranks = ["--num_accelerators", str(self.num_ranks), "--master_port", str(free_port())]
        return [sys.executable, str(launcher), "--quiet", *ranks, "--no_local_rank", "--module"]


def seconds_of(batches: Sequence[Sequence[BatchSpans]]) -> float:
    """A batch's, of the slowest rank; the median."""
    return statistics.median(
        max(each.end_s - each.start_s for each in of_ranks) for of_ranks in batches
    )
