"""Where the time of a run's batches went, from the event logs of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from easyrl.metrics.event_log import read_events


@dataclass(frozen=True)
class Batch:
    """Spans of one batch, seconds; of several ranks the longest of each."""

    wall: float
    generation: float  # dispatch to the last group
    training: float  # sum of micro-batches
    step: float  # after the last micro-batch
    sync: float
    first_group: float
    tail: float  # from the last group's arrival to the end of training


def read_batches(run_dir: Path, num_ranks: int) -> list[Batch]:
    """All batches of a run."""
    ranks = [_of_rank(run_dir / f"events-rank{rank}.jsonl") for rank in range(num_ranks)]
    return [
        Batch(*map(max, zip(*map(astuple, same), strict=True))) for same in zip(*ranks, strict=True)
    ]


def overlap(sync: Sequence[Batch], overlapped: Sequence[Batch]) -> dict[str, float]:
    """How the batches of an async run compare with the same ones of a sync run.

    ``bound_s`` is what no schedule can beat within one batch: the longer of generation and
    training, plus weight sync and optimizer step, summed over batches from the sync run's own
    spans. ``bound`` is the speed-up that it would be. ``own_efficiency`` has the bound from the
    async run's own spans: what else the machine did during one of the two runs does not move it.
    """
    sync_s, async_s = sum(b.wall for b in sync), sum(b.wall for b in overlapped)
    bound_s = _bound_s(sync)
    return {
        "sync_s": sync_s,
        "async_s": async_s,
        "async_over_sync": sync_s / async_s,
        "bound_s": bound_s,
        "bound": sync_s / bound_s,
        "efficiency": bound_s / async_s,
        "own_efficiency": _bound_s(overlapped) / async_s,
        "generation_s": sum(b.generation for b in sync),
        "training_s": sum(b.training for b in sync),
        "async_generation_s": sum(b.generation for b in overlapped),
        "async_training_s": sum(b.training for b in overlapped),
        "async_first_group_s": sum(b.first_group for b in overlapped),
        "async_tail_s": sum(b.tail for b in overlapped),
        "async_sync_and_step_s": sum(b.sync + b.step for b in overlapped),
    }


def training_over_generation(batches: Sequence[Batch]) -> float:
    """Of a sync run."""
    return sum(b.training for b in batches) / sum(b.generation for b in batches)


def _bound_s(batches: Sequence[Batch]) -> float:
    return sum(max(b.generation, b.training) + b.sync + b.step for b in batches)


def _of_rank(path: Path) -> list[Batch]:
    """Spans of every batch from one rank's log."""
    batches: list[Batch] = []
    dispatched = first_group = last_group = start = trained = step = sync_start = 0.0
    training = 0.0
    for event in read_events(path):
        t = event["t"]
        match event["event"]:
            case "batch_dispatched":
                dispatched, first_group, training = t, 0.0, 0.0
            case "group_ready":
                first_group = first_group or t
                last_group = t
            case "micro_batch_start":
                start = t
            case "micro_batch_end":
                training += t - start
                trained = t
            case "step":
                step = t
            case "sync_start":
                sync_start = t
            case "sync_end" if step:
                batches.append(
                    Batch(
                        wall=t - dispatched,
                        generation=last_group - dispatched,
                        training=training,
                        step=sync_start - trained,
                        sync=t - sync_start,
                        first_group=first_group - dispatched,
                        tail=max(0.0, trained - last_group),
                    )
                )
    return batches
