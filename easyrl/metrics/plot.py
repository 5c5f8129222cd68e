"""The curve of a run as a PNG: its reward, or the loss of a run on records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from easyrl.metrics.names import accuracies, accuracy_label

Curve = tuple[str, str, str]  # metric, label, style of the line


def plot_reward_curve(metrics: Sequence[dict[str, float]], path: Path) -> None:
    """Draws mean reward per step, and held-out accuracy, of each set, where it was measured."""
    _plot(
        metrics,
        path,
        ("reward/mean", "training reward (mean of batch)", "-"),
        *((name, accuracy_label(name), "o-") for name in accuracies(metrics)),
    )


def plot_loss_curve(metrics: Sequence[dict[str, float]], path: Path) -> None:
    """Draws the loss per step, and that of held-out records where it was measured."""
    _plot(metrics, path, ("loss", "training loss", "-"), ("eval/loss", "held-out loss", "o-"))


def _plot(metrics: Sequence[dict[str, float]], path: Path, *curves: Curve) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label, style in curves:
        points = [(m["step"], m[name]) for m in metrics if name in m]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
