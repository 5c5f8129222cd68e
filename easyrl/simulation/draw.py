"""Divisions of devices as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from easyrl.simulation.split import Split


def draw_splits(splits: Sequence[Split], path: Path) -> None:
    """Seconds of a batch and idle shares over the devices of inference, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(splits, key=lambda split: split.setting.endpoints)
    inference = [row.setting.endpoints * row.setting.devices_per_endpoint for row in rows]
    figure, (seconds, idle) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    seconds.plot(inference, [row.outcome.step_s for row in rows], "o-")
    seconds.set_ylabel("seconds of a batch")
    seconds.set_ylim(bottom=0)
    idle.plot(inference, [row.outcome.training_idle for row in rows], "o-", label="training idle")
    idle.plot(inference, [row.outcome.inference_idle for row in rows], "o-", label="inference idle")
    idle.set_xlabel("devices of inference")
    idle.set_ylim(0, 1)
    idle.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2, frameon=False)
    for axes in (seconds, idle):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
