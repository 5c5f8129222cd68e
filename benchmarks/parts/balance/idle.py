"""Time in which a rank waits though there is a finished group that nobody has begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trained:
    """What one rank did.

    Attributes:
        rows: begin and end of each of its rows, in order.
        begun: by group, when its row began.
    """

    rows: Sequence[tuple[float, float]]
    begun: Mapping[int, float]


def idle_share(ranks: Sequence[Trained], arrivals_s: Sequence[float]) -> float:
    """Of the ranks' time, from the start to the last row's end.

    A rank's waiting counts while a group is finished and not begun by anybody, and behind its own
    last row, while another rank trains.
    """
    begun = {group: at for rank in ranks for group, at in rank.begun.items()}
    assert len(begun) == len(arrivals_s), "a group was not trained, or twice"
    end = max(rank.rows[-1][1] for rank in ranks if rank.rows)
    open_spans = _merged([(arrivals_s[group], at) for group, at in begun.items()])
    waited = 0.0
    for rank in ranks:
        last = rank.rows[-1][1] if rank.rows else 0.0
        gaps = _gaps(rank.rows)
        waited += end - last
        waited += sum(_overlap(gap, span) for gap in gaps for span in open_spans)
    return waited / (len(ranks) * end)


def _gaps(rows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Before and between ``rows``."""
    begins = [begin for begin, _ in rows]
    ends = [0.0, *(end for _, end in rows)]
    return list(zip(ends, begins, strict=False))  # what is behind the last row counts as a whole


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
