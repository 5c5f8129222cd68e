"""Rows of ``benchmarks.shared_prompt``: from seconds to speed-ups, for people and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import Qwen3Config

from benchmarks.parts.shared_prompt.flops import MODEL, Counting, Work, flops
from benchmarks.parts.shared_prompt.sizes import Shape

OURS, PACKED = "ours", "packed"
PEERS = ("padded", PACKED, "prefix_grouper", "trl", "trl_own_head")


def make_row(
    shape: Shape,
    shared: Work,
    separate: Work,
    config: Qwen3Config,
    count: Counting,
    seconds: Mapping[str, Sequence[float]],
    errors: Mapping[str, tuple[float, float]],
    peak_flops: float,
) -> dict[str, Any]:
    """Speed-ups are medians over repeats of the other side's seconds over ours in the same repeat.

    None where a side did not run. ``flop_ideal`` is the ratio of the operations that (b) and we
    have to do, ``ratio_of_ideal`` the share of it that the clock shows, ``mfu`` our model
    operations per second as a share of ``peak_flops``.
    """
    ideal = flops(separate, config, count) / flops(shared, config, count)
    row: dict[str, Any] = {**shape._asdict(), "flop_ideal": ideal}
    for peer in PEERS:
        row[f"vs_{peer}"] = speed_up(seconds.get(peer, ()), seconds.get(OURS, ()))
    vs_packed = row["vs_packed"]
    row["ratio_of_ideal"] = None if vs_packed is None else vs_packed / ideal
    row["seconds"] = {name: statistics.median(values) for name, values in seconds.items()}
    row["max_error"] = max((max(error) for error in errors.values()), default=None)
    row["mfu"] = row["tflops"] = None
    if OURS in row["seconds"]:
        achieved = flops(shared, config, MODEL) / row["seconds"][OURS]
        row["tflops"], row["mfu"] = achieved / 1e12, achieved / peak_flops
    return _rounded(row)


def speed_up(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    """The median over repeats of ``theirs / ours``; None where one of them is missing."""
    if not theirs or not ours:
        return None
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per row; speed-ups above 1 are ours."""
    columns = ["P", "G", "R", "flop_ideal", "ratio_of_ideal", *(f"vs_{peer}" for peer in PEERS)]
    columns += ["tflops", "mfu"]
    lines = ["  ".join(f"{column.removeprefix('vs_'):>14}" for column in columns)]
    for row in rows:
        values = ["-" if row[column] is None else str(row[column]) for column in columns]
        lines.append("  ".join(f"{value:>14}" for value in values))
    return "\n".join(lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
