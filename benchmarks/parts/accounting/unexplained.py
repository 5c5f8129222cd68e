"""How much of their time the accounts of a run's lanes leave unexplained."""

from __future__ import annotations

from collections.abc import Iterable

from easyrl.timeline.accounting import LaneAccount


def most_unexplained(accounts: Iterable[LaneAccount]) -> float:
    """The largest share of a lane's time, over all its batches."""
    lanes: dict[str, list[LaneAccount]] = {}
    for each in accounts:
        lanes.setdefault(each.lane, []).append(each)
    return max(
        sum(each.unexplained_s for each in own) / sum(each.wall_s for each in own)
        for own in lanes.values()
    )
