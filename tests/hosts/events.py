"""Where a run is, by the events that its ranks record."""

from __future__ import annotations

from pathlib import Path

from easyrl.metrics.event_log import read_events
from tests.waiting import wait_until

BATCH_S = 120.0


def num_events(run_dir: Path, name: str) -> int:
    """How many of them all ranks have recorded so far."""
    files = run_dir.glob("events-rank*.jsonl")
    return sum(event["event"] == name for file in files for event in read_events(file))


def wait_for_open_batch(run_dir: Path, number: int, batch_size: int) -> None:
    """Some groups of it are finished, some are not."""
    begun = number * batch_size + 2
    wait_until(lambda: num_events(run_dir, "group_ready") >= begun, BATCH_S)
    assert num_events(run_dir, "group_ready") < (number + 1) * batch_size


def trained(run_dir: Path) -> list[list[int]]:
    """The prompts of the groups that each rank has trained, in closed batches."""
    return [
        [event["index"] for event in read_events(file) if event["event"] == "group_closed"]
        for file in sorted(run_dir.glob("events-rank*.jsonl"))
    ]
