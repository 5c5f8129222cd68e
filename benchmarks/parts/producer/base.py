"""The producer of another revision of this repository beside today's, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.parts.worktree import ROOT, worktree


def compare_with_base(
    revision: str, pairs: int, folder: Path, run_easyrl: Callable[[str, Path], dict]
) -> dict[str, object]:
    """Ratios of what a processor second gives, today over ``revision``, one of each pair of runs.

    ``run_easyrl(name, checkout)`` runs the side ``easyrl`` there. Who begins changes from pair to
    pair.
    """
    ratios = []
    with worktree(revision, folder / "checkout") as base:
        for number in range(pairs):
            checkouts = {"base": base, "now": ROOT}
            order = sorted(checkouts, reverse=number % 2 == 1)
            rates = {side: run_easyrl(side, checkouts[side])["groups_per_cpu_s"] for side in order}
            ratios.append(rates["now"] / rates["base"])
    return {
        "base": revision,
        "groups_per_cpu_s_ratio": round(statistics.median(ratios), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
    }
