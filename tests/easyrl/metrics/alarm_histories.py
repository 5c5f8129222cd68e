"""Made-up histories of metrics: runs that collapse in one way, and healthy noisy ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from easyrl.config import AlarmsConfig
from easyrl.metrics.alarms.alarms import Alarms
from easyrl.metrics.event_log import ignore

Batch = dict[str, float]

# A batch of a run that goes on as it began.
STEADY: Batch = {
    "reward/mean": 0.5,
    "reward/flat_groups": 0.25,
    "batch/groups": 32.0,
    "batch/groups_rejected": 0.0,
    "response/mean_tokens": 800.0,
    "response/truncated": 0.05,
    "response/repetition": 0.02,
    "policy/entropy": 0.6,
    "policy/kl": 0.02,
    "policy/clip_low": 0.01,
    "policy/clip_high": 0.01,
    "policy/logprob_diff": 0.005,
    "grad_norm": 0.3,
}


def batches(count: int, **changed: float) -> list[Batch]:
    """``count`` steady batches; ``changed`` names metrics with two underscores for the slash."""
    own = {name.replace("__", "/"): value for name, value in changed.items()}
    assert set(own) <= set(STEADY)
    return [STEADY | own for _ in range(count)]


def noisy(history: Sequence[Batch], rng: np.random.Generator, scale: float = 0.1) -> list[Batch]:
    """Each figure times a log-normal factor, groups as they are."""
    return [
        {n: v * (1.0 if "groups" in n else rng.lognormal(0.0, scale)) for n, v in batch.items()}
        for batch in history
    ]


def raised_by(
    history: Iterable[Mapping[str, float]], config: AlarmsConfig | None = None
) -> list[tuple[str, int]]:
    """Each alarm that is raised, and behind which batch, counted from 1."""
    alarms = Alarms(config or AlarmsConfig(), ignore)
    for step, metrics in enumerate(history, start=1):
        alarms.look(step, metrics)
    return [(alarm.name, alarm.step) for alarm in alarms.take()]


def healthy(rng: np.random.Generator, count: int) -> list[Batch]:
    """A run that learns: reward and length move, entropy falls and stays, gradients spike."""
    t = np.linspace(0.0, 1.0, count)
    speed, low, high = rng.uniform(3, 12), rng.uniform(0.1, 0.4), rng.uniform(0.5, 0.9)
    learned = 1 - np.exp(-speed * t)

    def figure(values: np.ndarray, noise: float) -> np.ndarray:
        return values * rng.lognormal(0.0, noise, count)

    entropy = rng.uniform(0.1, 1.5) * (1 - rng.uniform(0.1, 0.8) * learned)
    grad_norm = figure(rng.uniform(0.05, 1.0) * rng.uniform(0.5, 1.5) ** t, 0.3)
    grad_norm[rng.random(count) < 0.05] *= rng.uniform(5, 50)
    flat = rng.uniform(0.05, 0.3) + rng.uniform(0.0, 0.25) * learned
    columns = {
        "reward/mean": low + (high - low) * learned + rng.normal(0.0, 0.02, count),
        "reward/flat_groups": np.clip(flat + rng.normal(0.0, 0.05, count), 0.0, 1.0),
        "batch/groups": np.full(count, 32.0),
        "batch/groups_rejected": np.zeros(count),
        "response/mean_tokens": figure(800.0 * rng.uniform(0.6, 4.0) ** t, 0.08),
        "response/truncated": figure(0.05 + rng.uniform(-0.04, 0.1) * t, 0.3),
        "response/repetition": figure(0.02 + rng.uniform(0.0, 0.05) * t, 0.3),
        "policy/entropy": figure(entropy, 0.08),
        "policy/kl": figure(1e-3 + rng.uniform(0.0, 0.15) * t, 0.3),
        "policy/clip_low": figure(rng.uniform(0, 0.01) * (1 + t), 0.4),
        "policy/clip_high": figure(rng.uniform(0, 0.01) * (1 + t), 0.4),
        "policy/logprob_diff": figure(rng.uniform(1e-7, 0.03) * (1 - 0.5 * learned), 0.15),
        "grad_norm": grad_norm,
    }
    assert set(columns) == set(STEADY)
    return [{name: float(values[i]) for name, values in columns.items()} for i in range(count)]
