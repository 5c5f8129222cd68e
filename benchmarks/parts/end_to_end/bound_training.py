"""The training of a run's batches again, from its journal.

As a command, in a process of its own, beside which something else is measured. Arguments: files of
the job, a ``TrainingJob`` as JSON, and of the answer, what ``train_batches`` returns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from easyrl.build.replay import replay_batch
from easyrl.config import Config
from easyrl.config.file import load_config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.recipes.loading import with_whole_recipe


class TrainingJob(msgspec.Struct):
    """What the process is given to do."""

    run_dir: str
    last: int  # batch of the run, from 0


class BatchTraining(msgspec.Struct):
    """One batch, on one core."""

    seconds: float  # forward and backward
    processor_s: float  # with loading, packing and the optimizer step
    start_s: float  # of time.monotonic
    end_s: float


def train_batches(
    run: RecordedRun,
    last: int,
    config: Config,
    before: Callable[[int, DeepSpeedEngine], object] = lambda v, engine: None,
) -> dict[int, BatchTraining]:
    """The batches up to ``last``, as the run has trained them, with one thread.

    ``before`` is called before each, and does not count in its time.
    """
    torch.set_num_threads(1)
    entered: dict[int, tuple[float, float]] = {}  # processor and clock, by closed batches
    left: dict[int, tuple[float, float]] = {}

    def on_weights(closed: int, engine: DeepSpeedEngine) -> None:
        entered[closed] = time.process_time(), time.monotonic()
        before(closed, engine)
        left[closed] = time.process_time(), time.monotonic()

    metrics_of = replay_batch(run, last, config, on_weights).metrics_of
    found = {}
    for v in range(last + 1):
        metrics = metrics_of[run.batch(v).step]
        seconds = metrics["time/train_s"] + metrics["time/look_ahead_s"]
        used_s = entered[v + 1][0] - left[v][0]
        found[v] = BatchTraining(seconds, used_s, left[v][1], entered[v + 1][1])
    return found


def recorded(run_dir: Path) -> tuple[RecordedRun, Config]:
    """The run in a folder, and its settings."""
    run = RecordedRun(run_dir)
    return run, with_whole_recipe(load_config(run.config_file(0), (), to_look_back=True))


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    job = msgspec.json.decode(source.read_bytes(), type=TrainingJob)
    run, config = recorded(Path(job.run_dir))
    target.write_bytes(msgspec.json.encode(train_batches(run, job.last, config)))


if __name__ == "__main__":
    main()
