"""Metrics over steps as the report draws them: which, and of how many points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from easyrl.metrics.names import declared

MOST_POINTS = 1000  # of a curve: more than a screen has columns for
MOST_CURVES = 8  # of a chart
Point = TypeVar("Point", bound=tuple[float, float])


class Chart(NamedTuple):
    """Metrics that are drawn together; ``*`` in a name stands for anything."""

    title: str
    names: tuple[str, ...]


CHARTS = (
    Chart("Reward", ("reward/mean", "reward/std", "reward/min", "reward/max")),
    Chart("Rewards by name", ("reward/*/mean",)),
    Chart("Held-out accuracy", ("eval/*accuracy", "eval/*avg@*", "eval/*pass@*")),
    Chart("Loss", ("loss", "eval/loss")),
    Chart("Pairs ordered as wanted", ("policy/accuracy",)),
    Chart(
        "Response length", ("response/mean_tokens", "response/min_tokens", "response/max_tokens")
    ),
    Chart("Truncated and repetitive responses", ("response/truncated", "response/repetition")),
    Chart("Entropy", ("policy/entropy",)),
    Chart("KL to the reference, to a teacher", ("policy/kl", "policy/teacher_kl")),
    Chart(
        "Clip fraction",
        (
            "policy/clipped",
            "policy/clip_low",
            "policy/clip_high",
            "policy/clip_delta",
            "policy/clip_dual",
        ),
    ),
    Chart(
        "Log-probabilities, trainer against inference",
        ("policy/logprob_diff", "policy/logprob_diff_max", "policy/inference_kl"),
    ),
    Chart("Groups without signal", ("batch/groups_without_signal", "batch/groups_rejected")),
    Chart("Groups of equal rewards", ("reward/flat_groups",)),
    Chart("Gradient norm", ("grad_norm", "critic/grad_norm")),
    Chart("Learning rate", ("learning_rate", "critic/learning_rate")),
    Chart("Throughput per device", ("throughput/*per_device",)),
    Chart("Seconds per step", ("time/step_s", "time/wait_s", "time/train_s", "time/sync_s")),
    Chart("Memory, peak since the start", ("memory/device_peak_gib", "memory/host_peak_gib")),
    Chart("Device memory by phase, peaks", ("memory/*/device_peak_gib",)),
    Chart("Host memory by phase, peaks", ("memory/*/host_peak_gib",)),
    Chart("/dev/shm by phase, peaks", ("memory/*/shm_peak_gib",)),
)


class Curve(NamedTuple):
    """One metric, as it is drawn."""

    name: str
    steps: list[int]
    values: list[float]


def charts_of(metrics: Sequence[Mapping[str, float]]) -> list[tuple[Chart, str, list[Curve]]]:
    """The charts that a run has values for, with their unit and curves."""
    found = []
    known_names = sorted({name for row in metrics for name in row})
    for chart in CHARTS:
        names = [n for each in chart.names for n in known_names if fnmatchcase(n, each)]
        drawn = (curve_of(metrics, name) for name in dict.fromkeys(names))
        curves = _highest([curve for curve in drawn if curve is not None])
        if curves:
            known = declared(curves[0].name)
            found.append((chart, known.unit if known is not None else "", curves))
    return found


def _highest(curves: list[Curve]) -> list[Curve]:
    """As many as a chart has room for, in their order: those with the largest values."""
    kept = sorted(curves, key=lambda curve: max(curve.values), reverse=True)[:MOST_CURVES]
    return [curve for curve in curves if curve in kept]


def curve_of(
    metrics: Iterable[Mapping[str, float]], name: str, most: int = MOST_POINTS
) -> Curve | None:
    """``name`` over the steps that have it, of at most ``most`` points; None: no step has it."""
    points = [(int(row["step"]), row[name]) for row in metrics if is_number(row.get(name))]
    if not points:
        return None
    steps, values = zip(*downsampled(points, most), strict=True)
    return Curve(name, list(steps), list(values))


def is_number(value: object) -> bool:
    """Whether a metric can be drawn: in a file of JSON what is not finite is null."""
    return isinstance(value, int | float) and math.isfinite(value)


def downsampled(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` of ``points``, in order: of each stretch the least and the largest value.

    So no peak is lost. The first and the last point stay. ``most`` is at least 4.
    """
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    num_stretches = (most - 2) // 2
    kept = [points[0]]
    for number in range(num_stretches):
        first = number * len(inner) // num_stretches
        last = (number + 1) * len(inner) // num_stretches
        stretch = range(first, last)
        if stretch:
            chosen = {
                min(stretch, key=lambda i: inner[i][1]),
                max(stretch, key=lambda i: inner[i][1]),
            }
            kept += [inner[i] for i in sorted(chosen)]
    return [*kept, points[-1]]
