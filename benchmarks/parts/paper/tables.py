"""What each table compares, and how its rows are made of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.parts.paper import figures
from benchmarks.parts.paper.baseline import Baseline
from benchmarks.parts.paper.finished_run import FinishedRun
from benchmarks.parts.paper.rows import Row
from benchmarks.parts.paper.sides import Side
from benchmarks.parts.paper.startup import MeasuredStartup, measured_startup

FOLDER = Path(__file__).parent
UNSHARED = ("trainer.packing=none",)
SYNC = Side("sync", "sync", UNSHARED)
ASYNC = Side("async", "async", UNSHARED)
SEPARATE, SHARED = (
    Side("unshared", settings=UNSHARED),
    Side("shared", settings=("trainer.packing=prompt",)),
)

Runs = Mapping[str, Sequence[FinishedRun]]  # by side


@dataclass(frozen=True)
class Table:
    """Sides, their configuration on a cluster, and the rows made of their runs."""

    about: str
    config: Path
    steps: int  # on a cluster
    sides: tuple[Side, ...]
    rows: Callable[[Runs, Sequence[Baseline]], list[Row]]  # baselines: none where refused
    made_up_prompt_tokens: int | None = None  # None: the cluster's own data
    no_baseline: str | None = None  # why another trainer's run has no row here


def overlap_rows(runs: Runs, baselines: Sequence[Baseline]) -> list[Row]:
    """Table 1. Ratios are to the synchronous run, its bound for an asynchronous one."""
    sync, overlapped = runs[SYNC.name], runs[ASYNC.name]
    of_sync = median(run.tpspd for run in sync)
    paper = figures.SYNC_8B.tpspd
    return [
        *(
            Row(each.name, each.tpspd, each.tpspd / of_sync, figures.MINDSPEED_8B.tpspd / paper)
            for each in baselines
        ),
        Row(SYNC.name, of_sync, 1.0, 1.0, 1.0),
        Row(
            ASYNC.name,
            median(run.tpspd for run in overlapped),
            median(a.tpspd / s.tpspd for a, s in zip(overlapped, sync, strict=True)),
            figures.ASYNC_8B.tpspd / paper,
            median(run.overlap_bound for run in sync),
        ),
    ]


def large_model_rows(runs: Runs, baselines: Sequence[Baseline]) -> list[Row]:
    """Table 2, of an asynchronous run and a baseline. Ratios are to the baseline; no bound."""
    tpspd = median(run.tpspd for run in runs[ASYNC.name])
    reference = baselines[0].tpspd if baselines else None
    paper = figures.ASYNC_32B.tpspd / figures.MINDSPEED_32B.tpspd
    rows = [Row(each.name, each.tpspd, each.tpspd / baselines[0].tpspd, 1.0) for each in baselines]
    return [*rows, Row(ASYNC.name, tpspd, tpspd / reference if reference else None, paper)]


def scaling_rows(runs: Runs, baselines: Sequence[Baseline]) -> list[Row]:
    """Table 3. Ratios of tokens per second to the smallest cluster; bound: as many more devices."""
    smallest = runs[SCALING[0].name]
    rows = []
    for side in SCALING:
        own = runs[side.name]
        assert side.devices is not None and SCALING[0].devices is not None
        rows.append(
            Row(
                side.name,
                median(run.tpspd for run in own),
                median(
                    run.tokens_per_s / first.tokens_per_s
                    for run, first in zip(own, smallest, strict=True)
                ),
                figures.speed_up(side.devices),
                side.devices / SCALING[0].devices,
            )
        )
    return rows


def startup_rows(runs: Runs, baselines: Sequence[Baseline]) -> list[Row]:
    """How much sooner training begins than in the synchronous run.

    ``paper_ratio``: it says more than that. ``bound``: the ratio by equations (12) and (13) from
    the times of the same runs' groups; no bound, but what the paper predicts.
    """
    sync, overlapped = ([measured_startup(run) for run in runs[s.name]] for s in (SYNC, ASYNC))
    pairs = list(zip(overlapped, sync, strict=True))
    return [
        Row(
            SYNC.name,
            median(run.tpspd for run in runs[SYNC.name]),
            1.0,
            1.0,
            1.0,
            _startup_seconds(sync, [each.sync_s for each in sync]),
        ),
        Row(
            ASYNC.name,
            median(run.tpspd for run in runs[ASYNC.name]),
            median(s.measured_s / a.measured_s for a, s in pairs),
            figures.STARTUP_RATIO,
            median(s.sync_s / a.async_s for a, s in pairs),
            _startup_seconds(overlapped, [each.async_s for each in overlapped]),
        ),
    ]


def shared_prompt_rows(runs: Runs, baselines: Sequence[Baseline]) -> list[Row]:
    """Ratios to the run whose sequences each have their prompt; bound: tokens of these over ours.

    ``training_ratio``: of the seconds of forward and backward alone. The paper gives no figure. A
    baseline has its own way with prompts, and no bound.
    """
    separate, shared = runs[SEPARATE.name], runs[SHARED.name]
    pairs = list(zip(shared, separate, strict=True))
    of_separate = median(run.tpspd for run in separate)
    return [
        *(Row(each.name, each.tpspd, each.tpspd / of_separate) for each in baselines),
        Row(SEPARATE.name, of_separate, 1.0, None, 1.0),
        Row(
            SHARED.name,
            median(run.tpspd for run in shared),
            median(ours.tpspd / other.tpspd for ours, other in pairs),
            None,
            median(run.tokens / run.packed_tokens for run in shared),
            {"training_ratio": median(o.training_s / ours.training_s for ours, o in pairs)},
        ),
    ]


SCALING = tuple(Side(f"{n} devices", settings=UNSHARED, devices=n) for n in figures.SCALING_8B)
OF_8B = FOLDER / "table1.yaml"
TABLES = {
    "table1": Table("sync and async", OF_8B, 100, (SYNC, ASYNC), overlap_rows),
    "table2": Table(
        "async, a larger model", FOLDER / "table2.yaml", 20, (ASYNC,), large_model_rows
    ),
    "table3": Table(
        "16, 32 and 64 devices",
        OF_8B,
        20,
        SCALING,
        scaling_rows,
        no_baseline="its ratios are to the same trainer on 16 devices",
    ),
    "startup": Table(
        "when training begins, equations (12) and (13)",
        OF_8B,
        5,
        (SYNC, ASYNC),
        startup_rows,
        no_baseline="a log does not say when training began",
    ),
    "shared_prompt": Table(
        "long prompts and short responses, shared or not",
        FOLDER / "shared_prompt.yaml",
        10,
        (SEPARATE, SHARED),
        shared_prompt_rows,
        made_up_prompt_tokens=4096,
    ),
}


def _startup_seconds(
    measured: Sequence[MeasuredStartup], predicted_s: Sequence[float]
) -> dict[str, float]:
    return {
        "measured_s": median(each.measured_s for each in measured),
        "predicted_s": median(predicted_s),
    }
