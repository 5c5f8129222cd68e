"""How fast these requests and micro-batches could be at most, on two cores.

With a core for each phase: the longer of generation and training of one batch, each alone, plus
push and optimizer step. No schedule that leaves each phase its core beats that. Ours may lend: once
the server rests, training has both cores. What nothing can beat then is the longer of generation
and half of the processor seconds of both (``shared_s``), plus the same. On a machine with more
cores both are of two (``taskset -c 0,1``).

Three batches of the run stand for all, each made again from the run's own journal, so that prompts,
seeds, groups and rows are those of the run: in order of what the run spent on training them, those
at the quartiles. The first of a run is none of them, it is trained by a process that has not warmed
up. Generation is that of the fastest fixed concurrency; training leaves out the groups without
signal, as the run does.

Where all groups end at about the same time no schedule comes near either. So an estimate says what
these requests allow if nothing is trained before it is generated: the batch's training in the order
in which its groups were complete, none of it before its group was, on one core while others are
generated and on both, twice as fast, behind the last; with the best of the fixed concurrencies. It
is no bound: a group costs its share of the batch's training by its tokens, and no other order of
requests was tried. But it leaves out all that a schedule costs.

Cores of one machine share memory and caches, so that each phase takes longer while the other one is
at work. How much longer is measured too, of one of the batches: it is generated again and again
while another process trains. Both the bound of shared cores and the estimate are told a second time
with that slow-down (``beside_s``, ``arrival_beside_s``).
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.parts.end_to_end.ideal_schedules import (
    NUM_CORES,
    Group,
    Slowdown,
    started_together,
)
from benchmarks.parts.end_to_end.ours import THREADS, run_command
from benchmarks.parts.end_to_end.processor_time import SERVER_PROCESSOR, TRAINER_PROCESSOR
from benchmarks.parts.end_to_end.rows import Step
from benchmarks.parts.end_to_end.workloads import Workload

GENERATE, TRAIN = "generate alone", "train alone"
# Older rows have "as they arrive", on one core throughout and of fewer concurrencies.
AS_THEY_ARRIVE = "as they arrive, both cores"
AS_THEY_ARRIVE_BESIDE = "as they arrive, beside each other"
# Seconds of one alone, as slow as while the other one is at work; older rows have none.
GENERATE_BESIDE, TRAIN_BESIDE = "generate beside training", "train beside generation"
CONCURRENCIES = (16, 32, 64, 128, 256)


class BoundJob(msgspec.Struct):
    """What the process that repeats batches is given to do."""

    run_dir: str
    batches: list[int]  # of the run, from 0, in ascending order
    folder: str  # receives the weights that they were made by
    concurrencies: list[int]  # requests in flight, to be tried


class Generated(msgspec.Struct):
    """A batch's responses, with the trainer stopped."""

    seconds: float
    processor_s: float  # of the server
    response_tokens: float  # mean
    groups: list[Group]


class BatchCost(msgspec.Struct):
    """One batch, each phase alone on one core."""

    training_s: float  # forward and backward
    training_processor_s: float  # with loading, packing and the optimizer step
    generation: Generated  # with the fastest concurrency
    as_they_arrive_s: float  # both, with the concurrency that ends first
    slowdown: Slowdown  # of each beside the other
    as_they_arrive_beside_s: float  # both, as slow as that


def measure(work: Workload, run_dir: Path, steps: Sequence[Step], folder: Path) -> Sequence[Step]:
    """The bound of each of the batches, as if it were a step of the run. Raises ``RuntimeError``.

    ``steps``: those of the run that count.
    """
    batches = typical(steps, first=0 if work.num_our_warm_up else 1)
    job = BoundJob(
        str(run_dir.absolute()),
        [work.num_our_warm_up + batch for batch in batches],
        str(folder.absolute()),
        sorted({min(inflight, work.num_sequences) for inflight in CONCURRENCIES}),
    )
    source, target = folder / "bound-job.json", folder / "bound-answer.json"
    source.write_bytes(msgspec.json.encode(job))
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
    costs = msgspec.json.decode(target.read_bytes(), type=list[BatchCost])
    return [
        _as_step(cost, steps, steps[batch].reward)
        for batch, cost in zip(batches, costs, strict=True)
    ]


def _as_step(cost: BatchCost, steps: Sequence[Step], reward: float) -> Step:
    spans = {
        GENERATE: cost.generation.seconds,
        TRAIN: cost.training_s,
        AS_THEY_ARRIVE: cost.as_they_arrive_s,
        GENERATE_BESIDE: cost.generation.seconds * cost.slowdown.generation,
        TRAIN_BESIDE: cost.training_s * cost.slowdown.training,
        AS_THEY_ARRIVE_BESIDE: cost.as_they_arrive_beside_s,
        "optimizer": _median(steps, "optimizer"),
        "sync": _median(steps, "sync"),
        SERVER_PROCESSOR: cost.generation.processor_s,
        TRAINER_PROCESSOR: cost.training_processor_s,
    }
    seconds = max(spans[GENERATE], spans[TRAIN]) + spans["optimizer"] + spans["sync"]
    return Step(seconds, spans, reward, cost.generation.response_tokens)


def shared_s(step: Step) -> float:
    """What nothing can beat on two cores that are lent, of a step of ``measure``."""
    spans = step.spans
    both_s = (spans[SERVER_PROCESSOR] + spans[TRAINER_PROCESSOR]) / NUM_CORES
    return max(spans[GENERATE], both_s) + spans["optimizer"] + spans["sync"]


def arrival_s(step: Step) -> float | None:
    """The estimate for training in order of arrival, of a step of ``measure``; None: an older row's
    has none."""
    return _with_border(step, step.spans.get(AS_THEY_ARRIVE))


def beside_s(step: Step) -> float | None:
    """The bound of shared cores, each phase as slow as beside the other; None: an older row's."""
    spans = step.spans
    if GENERATE_BESIDE not in spans:
        return None
    generation_s, training_s = spans[GENERATE], spans[TRAIN]
    slowdown = Slowdown(spans[GENERATE_BESIDE] / generation_s, spans[TRAIN_BESIDE] / training_s)
    return _with_border(step, started_together(generation_s, training_s, slowdown))


def arrival_beside_s(step: Step) -> float | None:
    """The estimate, each phase as slow as beside the other; None: an older row's."""
    return _with_border(step, step.spans.get(AS_THEY_ARRIVE_BESIDE))


def _with_border(step: Step, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return seconds + step.spans["optimizer"] + step.spans["sync"]


def typical(steps: Sequence[Step], first: int) -> list[int]:
    """Up to three of the steps from ``first`` on, ascending; the first if there is no other."""

    def trained_s(number: int) -> float:
        return steps[number].spans["train"] + steps[number].spans["look ahead"]

    order = sorted(range(first, len(steps)), key=trained_s) or [0]
    last = len(order) - 1
    return sorted({order[round(last * share)] for share in (0.25, 0.5, 0.75)})


def _median(steps: Sequence[Step], span: str) -> float:
    return statistics.median(step.spans[span] for step in steps)
