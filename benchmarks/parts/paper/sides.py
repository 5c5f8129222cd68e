"""Sides of a table, and whoever runs them in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.parts.overlap.runs import Mode
from benchmarks.parts.paper.finished_run import FinishedRun


@dataclass(frozen=True)
class Side:
    """One way to train that a table compares."""

    name: str
    mode: Mode = "async"
    settings: tuple[str, ...] = ()  # overrides of the table's configuration
    devices: int | None = None  # of the cluster, so many; None: all


class Bench(Protocol):
    """Where sides are run."""

    note: str  # behind the names of its rows

    def run(self, side: Side, run_dir: Path) -> FinishedRun:
        """A run in a new folder, or, on a cluster, one that goes on. Raises ``RuntimeError``."""
        ...


def in_turns(
    bench: Bench, sides: Sequence[Side], repeats: int, folder: Path
) -> dict[str, list[FinishedRun]]:
    """The runs of each side, by its name; who begins changes with each repeat."""
    runs: dict[str, list[FinishedRun]] = {side.name: [] for side in sides}
    for repeat in range(repeats):
        first = repeat % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            run_dir = folder / f"{side.name.replace(' ', '-')}-{repeat}"
            run = bench.run(side, run_dir)
            runs[side.name].append(run)
            print(
                f"  {side.name}: {run.seconds:.1f} s, {run.tokens:.0f} tokens, {run.tpspd:.1f} "
                f"tokens/s/device",
                flush=True,
            )
    return runs
