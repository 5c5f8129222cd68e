"""Metrics over steps as the report draws them: which, and of how many points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from easyrl.metrics.names import declared
from easyrl.report.columns import Column

MOST_POINTS = 1000  # of a curve: more than a screen has columns for
MOST_CURVES = 8  # of a chart


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
    Chart(
        "Throughput per device: of the sequences (TPSPD), packed",
        ("throughput/tpspd", "throughput/tokens_per_s_per_device"),
    ),
    Chart("Trainers' time in a batch", ("time/trainer_*_share", "time/unexplained_share")),
    Chart("Endpoints' time in a batch", ("time/inference_*_share",)),
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


def charts_of(columns: Mapping[str, Column]) -> list[tuple[Chart, str, list[Curve]]]:
    """The charts that a run has values for, with their unit and curves.

    ``columns``: of all metrics, by name.
    """
    found = []
    known_names = sorted(columns)
    for chart in CHARTS:
        names = [n for each in chart.names for n in known_names if fnmatchcase(n, each)]
        curves = [curve_of(name, columns[name]) for name in _highest(names, columns)]
        if curves:
            known = declared(curves[0].name)
            found.append((chart, known.unit if known is not None else "", curves))
    return found


def _highest(names: Sequence[str], columns: Mapping[str, Column]) -> list[str]:
    """As many as a chart has room for, in their order: those with the largest values."""
    names = list(dict.fromkeys(names))
    kept = sorted(names, key=lambda name: max(columns[name].values), reverse=True)[:MOST_CURVES]
    return [name for name in names if name in kept]


def curve_of(name: str, column: Column, most: int = MOST_POINTS) -> Curve:
    """Of at most ``most`` points, which have six digits."""
    steps, values = downsampled(column.steps, column.values, most)
    return Curve(name, steps, [float(f"{value:.6g}") for value in values])


def downsampled(x: Sequence[float], y: Sequence[float], most: int) -> tuple[list[Any], list[Any]]:
    """At most ``most`` of the points, in order: of each stretch the least and the largest y.

    So no peak is lost. The first and the last point stay. ``most`` is at least 4.
    """
    all_x, all_y = np.asarray(x), np.asarray(y)
    if len(all_x) > most:
        kept = _peaks(all_y, most)
        all_x, all_y = all_x[kept], all_y[kept]
    return all_x.tolist(), all_y.tolist()


def _peaks(y: np.ndarray, most: int) -> np.ndarray:
    """Places of the first, the last, and of each stretch between them the least and largest."""
    num_stretches = (most - 2) // 2
    inner = y[1:-1].astype(float)
    borders = np.arange(num_stretches + 1) * len(inner) // num_stretches
    longest = int(np.diff(borders).max())
    places = borders[:-1, None] + np.arange(longest)  # a row for each stretch
    is_own = places < borders[1:, None]
    values = inner[np.minimum(places, len(inner) - 1)]
    least = np.where(is_own, values, np.inf).argmin(axis=1)
    largest = np.where(is_own, values, -np.inf).argmax(axis=1)
    some = np.diff(borders) > 0
    found = borders[:-1][some], least[some], largest[some]
    return np.unique([0, *(found[0] + found[1] + 1), *(found[0] + found[2] + 1), len(y) - 1])
