"""When training of a batch began, and when equations (12) and (13) of the paper say it would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.parts.paper.finished_run import FinishedRun
from easyrl.metrics.event_log import read_events
from easyrl.timeline.reading import kept_batches, read_batch
from easyrl.timeline.startup import startup_times_of


@dataclass(frozen=True)
class MeasuredStartup:
    """Seconds from a batch's first request, medians over the counted batches of a run."""

    measured_s: float  # until the first micro-batch began
    sync_s: float  # until it would in a synchronous run by equation (12), from the groups' times
    async_s: float  # ... in an asynchronous one by equation (13)


def measured_startup(run: FinishedRun) -> MeasuredStartup:
    """Of the first rank's events, and of the timeline of all. Raises ``ValueError`` without one."""
    num_batches = len(run.steps)
    begun_s = list(training_begins_s(run.run_dir))[-num_batches:]
    batches = [read_batch(run.run_dir, batch) for batch in kept_batches(run.run_dir)]
    found = [startup_times_of(of_ranks) for of_ranks in batches[-num_batches:]]
    times = [each for each in found if each is not None]
    if not times or not begun_s:
        raise ValueError(
            f"{run.run_dir}: has no timeline or no events; leave timeline.keep and run.event_log on"
        )
    return MeasuredStartup(
        median(begun_s), median(each.sync_s for each in times), median(e.async_s for e in times)
    )


def training_begins_s(run_dir: Path) -> Iterator[float]:
    """Of each batch the seconds from its first request to its first micro-batch."""
    dispatched: float | None = None
    for event in read_events(run_dir / "events-rank0.jsonl"):
        if event["event"] == "batch_dispatched":
            dispatched = event["t"]
        elif event["event"] == "micro_batch_start" and dispatched is not None:
            yield event["t"] - dispatched
            dispatched = None
