"""The reward curve of a run as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot_reward_curve(metrics: Sequence[dict[str, float]], path: Path) -> None:
    """Draws mean reward per step, and held-out accuracy where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rewards = [(m["step"], m["reward/mean"]) for m in metrics if "reward/mean" in m]
    accuracy = [(m["step"], m["eval/accuracy"]) for m in metrics if "eval/accuracy" in m]
    if rewards:
        axes.plot(*zip(*rewards, strict=True), label="training reward (mean of batch)")
    if accuracy:
        axes.plot(*zip(*accuracy, strict=True), "o-", label="held-out accuracy")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
