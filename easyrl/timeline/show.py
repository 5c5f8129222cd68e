"""The accounts of a run's batches on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from easyrl.timeline.accounting import LaneAccount, mean_shares
from easyrl.timeline.spans import BatchSpans
from easyrl.timeline.startup import startup_times_of

LEAST_SHARE = 0.001  # of a lane's time: what is less has no row


def print_accounts(accounts: Sequence[LaneAccount], console: Console) -> None:
    """A table of each kind of lane, rank and endpoint: the mean share of each cause."""
    for kind in ("rank", "endpoint"):
        lanes = sorted({a.lane for a in accounts if a.lane.startswith(f"{kind} ")})
        if not lanes:
            continue
        own: Mapping[str, Mapping[str, float]] = {
            lane: mean_shares(a for a in accounts if a.lane == lane) for lane in lanes
        }
        everywhere = mean_shares(a for a in accounts if a.lane in own)
        seconds = median(a.wall_s for a in accounts if a.lane in own)
        table = Table(title=f"{kind}s: share of a batch's time (median {seconds:.2f} s)")
        table.add_column("cause")
        shown = lanes if len(lanes) <= 4 else []
        for column in (*shown, *(["all"] if len(lanes) > 1 else [])):
            table.add_column(column, justify="right")
        for cause, share in everywhere.items():
            if share >= LEAST_SHARE:
                shares = [own[lane].get(cause, 0.0) for lane in shown]
                if len(lanes) > 1:
                    shares.append(share)
                table.add_row(cause, *(f"{100 * each:.1f} %" for each in shares))
        console.print(table)


def startup_line(batches: Sequence[Sequence[BatchSpans]]) -> str | None:
    """Equations (12) and (13) of the paper from the batches' own times; None without groups."""
    found = (startup_times_of(of_ranks) for of_ranks in batches)
    times = [each for each in found if each is not None]
    if not times:
        return None
    sync_s, async_s, first_s, last_s = (median(column) for column in zip(*times, strict=True))
    return (
        f"training can begin after {first_s:.2f} s (first group complete; equation 13 of the "
        f"paper: {async_s:.2f} s), synchronously after {last_s:.2f} s (all complete; equation 12: "
        f"{sync_s:.2f} s)"
    )
