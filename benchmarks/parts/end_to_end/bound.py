"""What no schedule of these requests and micro-batches could beat, one core for each phase.

The longer of generation and training of one batch, each alone, plus push and optimizer step. The
batch is the counted one whose responses have the median length; it is made again from the run's own
journal, so that prompts, seeds, groups and rows are those of the run. Generation is that of the
fastest fixed concurrency; training leaves out the groups without signal, as the run does.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.parts.end_to_end.ours import THREADS, run_command
from benchmarks.parts.end_to_end.processor_time import SERVER, TRAINER
from benchmarks.parts.end_to_end.rows import Step
from benchmarks.parts.end_to_end.workloads import Workload

GENERATE, TRAIN = "generate alone", "train alone"
CONCURRENCIES = (32, 64, 128, 256)


class BoundRequest(msgspec.Struct):
    """What the process that repeats a batch is asked for."""

    run_dir: str
    batch: int  # number of closed batches before it
    folder: str  # receives the weights that it was made by
    concurrencies: list[int]  # requests in flight, to be tried


class Generated(msgspec.Struct):
    """A batch's responses, with the trainer stopped."""

    seconds: float
    processor_s: float  # of the server
    response_tokens: float  # mean


class BatchCost(msgspec.Struct):
    """One batch, each phase alone on one core."""

    training_s: float  # forward and backward
    training_processor_s: float  # with loading, packing and the optimizer step
    generation: Generated  # with the fastest concurrency


def measure(work: Workload, run_dir: Path, steps: Sequence[Step], folder: Path) -> Step:
    """The bound as if it were a step of the run. Raises ``RuntimeError``.

    ``steps``: those of the run that count.
    """
    batch = typical(steps)
    request = BoundRequest(
        str(run_dir.absolute()),
        work.num_warm_up + batch,
        str(folder.absolute()),
        sorted({min(inflight, work.num_sequences) for inflight in CONCURRENCIES}),
    )
    source, target = folder / "bound-request.json", folder / "bound-response.json"
    source.write_bytes(msgspec.json.encode(request))
    target.unlink(missing_ok=True)
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    command = [
        sys.executable,
        "-m",
        "benchmarks.parts.end_to_end.bound_run",
        str(source),
        str(target),
    ]
    run_command(command, folder / "bound.log", environment)
    cost = msgspec.json.decode(target.read_bytes(), type=BatchCost)
    spans = {
        GENERATE: cost.generation.seconds,
        TRAIN: cost.training_s,
        "optimizer": _median(steps, "optimizer"),
        "sync": _median(steps, "sync"),
        SERVER: cost.generation.processor_s,
        TRAINER: cost.training_processor_s,
    }
    seconds = max(spans[GENERATE], spans[TRAIN]) + spans["optimizer"] + spans["sync"]
    return Step(seconds, spans, steps[batch].reward, cost.generation.response_tokens)


def typical(steps: Sequence[Step]) -> int:
    """Index of the step whose responses have the median length."""
    order = sorted(range(len(steps)), key=lambda number: steps[number].response_tokens)
    return order[len(order) // 2]


def _median(steps: Sequence[Step], span: str) -> float:
    return statistics.median(step.spans[span] for step in steps)
