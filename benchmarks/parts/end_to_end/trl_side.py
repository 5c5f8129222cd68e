"""TRL's side as seen from here: its process, and which micro-batch it is given."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from benchmarks.parts.end_to_end.ours import THREADS, run_command
from benchmarks.parts.end_to_end.rows import Measured
from benchmarks.parts.end_to_end.trl_job import TrlJob, TrlRun
from benchmarks.parts.end_to_end.workloads import Workload

TUNING_STEPS = 3


def require_trl() -> None:
    """Raises ``ValueError`` where it is not installed."""
    if find_spec("trl") is None:
        raise ValueError("TRL is not installed: pip install -c constraints.txt -e '.[bench]'")


def train(
    work: Workload,
    model: Path,
    prompts: Path,
    folder: Path,
    num_steps: int,
    num_threads: int,
    micro_batches: Sequence[int],
    seed: int = 0,
    *,
    measure_heldout: bool = False,
) -> dict[int, Measured]:
    """A run with each micro-batch, in one process. Raises ``RuntimeError``.

    Args:
        folder: receives what the process is told, prints and answers.
    """
    job = TrlJob(
        model=str(model.absolute()),
        prompts=str(prompts.absolute()),
        reward=work.reward,
        batch_size=work.batch_size,
        num_generations=work.num_generations,
        max_tokens=work.max_tokens,
        min_tokens=work.min_tokens,
        learning_rate=work.learning_rate,
        kl_coef=work.kl_coef,
        num_threads=num_threads,
        micro_batches=list(micro_batches),
        num_steps=num_steps,
        seed=seed,
        measure_heldout=measure_heldout,
    )
    source, target = folder / "trl-job.json", folder / "trl-answer.json"
    source.write_bytes(msgspec.json.encode(job))
    target.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, str(num_threads)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.parts.end_to_end.trl_run",
        str(source),
        str(target),
    ]
    run_command(command, folder / "trl.log", environment)
    runs = msgspec.json.decode(target.read_bytes(), type=list[TrlRun])
    return {run.micro_batch: run.measured for run in runs}


def num_skipped(work: Workload) -> int:
    """Prompts of ours, batches in which it tries, that are not trained here: the steps that count
    are of the same prompts on both sides."""
    return (work.num_our_warm_up - work.num_warm_up) * work.batch_size


def tuning_batch(work: Workload) -> int:
    """Prompts of a batch that the largest micro-batch fits into."""
    return -(-max(work.micro_batches) // work.num_generations)


def tune(
    work: Workload, model: Path, prompts: Path, folder: Path, num_threads: int
) -> dict[int, Measured]:
    """A few steps with each of the workload's micro-batches, without the first of each.

    Of a batch that may be smaller: what a sequence costs depends on its micro-batch alone.
    """
    smaller = replace(work, batch_size=tuning_batch(work))
    runs = train(smaller, model, prompts, folder, 1 + TUNING_STEPS, num_threads, work.micro_batches)
    return {size: Measured(run.steps[1:]) for size, run in runs.items()}


def fastest(runs: Mapping[int, Measured]) -> int:
    """The micro-batch with which training a batch is the fastest."""
    return min(runs, key=lambda size: train_s(runs[size]))


def train_s(run: Measured) -> float:
    """Seconds of training a batch, median over the steps."""
    return statistics.median(step.spans["train"] for step in run.steps)
