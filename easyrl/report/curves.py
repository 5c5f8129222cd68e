"""Metrics over steps as the report draws them: which, and of how many points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from easyrl.metrics.names import declared

MOST_POINTS = 1000  # of a curve: more than a screen has columns for


class Chart(NamedTuple):
    """Metrics that are drawn together."""

    title: str
    names: tuple[str, ...]


CHARTS = (
    Chart("Reward", ("reward/mean", "reward/std", "reward/min", "reward/max")),
    Chart("Held-out accuracy", ("eval/accuracy",)),
    Chart("Loss", ("loss", "eval/loss")),
    Chart(
        "Response length", ("response/mean_tokens", "response/min_tokens", "response/max_tokens")
    ),
    Chart("Truncated and repetitive responses", ("response/truncated", "response/repetition")),
    Chart("Entropy", ("policy/entropy",)),
    Chart("KL to the reference", ("policy/kl",)),
    Chart("Clip fraction", ("policy/clipped", "policy/clip_low", "policy/clip_high")),
    Chart(
        "Log-probabilities, trainer against inference",
        ("policy/logprob_diff", "policy/logprob_diff_max"),
    ),
    Chart("Groups without signal", ("batch/groups_without_signal", "batch/groups_rejected")),
    Chart("Gradient norm", ("grad_norm", "critic/grad_norm")),
    Chart("Learning rate", ("learning_rate",)),
    Chart("Throughput per device", ("throughput/tokens_per_s_per_device",)),
    Chart("Seconds per step", ("time/step_s", "time/wait_s", "time/train_s", "time/sync_s")),
)


class Curve(NamedTuple):
    """One metric, as it is drawn."""

    name: str
    steps: list[int]
    values: list[float]


def charts_of(metrics: Sequence[Mapping[str, float]]) -> list[tuple[Chart, str, list[Curve]]]:
    """The charts that a run has values for, with their unit and curves."""
    found = []
    more = tuple(sorted({name for row in metrics for name in row if name.startswith("memory/")}))
    for chart in (*CHARTS, Chart("Memory", more)):
        curves = [curve for name in chart.names if (curve := curve_of(metrics, name)) is not None]
        if curves:
            known = declared(curves[0].name)
            found.append((chart, known.unit if known is not None else "", curves))
    return found


def curve_of(
    metrics: Iterable[Mapping[str, float]], name: str, most: int = MOST_POINTS
) -> Curve | None:
    """``name`` over the steps that have it, of at most ``most`` points; None: no step has it."""
    points = [
        (int(row["step"]), float(row[name]))
        for row in metrics
        if name in row and math.isfinite(row[name])
    ]
    if not points:
        return None
    steps, values = zip(*downsampled(points, most), strict=True)
    return Curve(name, list(steps), list(values))


def downsampled(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
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
