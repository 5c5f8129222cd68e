"""A batch of the timeline as the report draws it: few numbers, compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from easyrl.report.curves import downsampled
from easyrl.report.packing import packed
from easyrl.timeline.accounting import LaneAccount, with_causes
from easyrl.timeline.chrome_trace import in_flight
from easyrl.timeline.spans import (
    EVALUATION,
    REQUEST,
    BatchSpans,
    Span,
    by_lane,
    is_endpoint,
    is_rank,
    spans_of,
)

MOST_LANES = 12  # of each kind, that are drawn
MOST_SPANS = 2400  # of all lanes together, of each lane the longest
MOST_COUNTS = 6000  # ... of requests in flight


def packed_batch(of_ranks: Sequence[BatchSpans], accounts: Sequence[LaneAccount]) -> str:
    """What is drawn of one batch: base64 of gzip of JSON.

    {"seconds", "ranks": [{"lane", "spans": [[name, start, seconds]]}], "endpoints": [{"lane",
    "spans", "times", "in_flight"}], "accounts": [{"lane", "wall_s", "causes"}], "left_out",
    "short_left_out"}, in seconds from the batch's begin. "left_out": lanes,
    "short_left_out": spans, that are not drawn.
    """
    start_s = min(each.start_s for each in of_ranks)
    end_s = max(each.end_s for each in of_ranks)
    lanes = by_lane([span for span in spans_of(of_ranks) if span.end_s > start_s])
    ranks = {lane: spans for lane, spans in lanes.items() if is_rank(lane)}
    endpoints = {lane: spans for lane, spans in lanes.items() if is_endpoint(lane)}
    drawn_ranks = list(ranks.items())[:MOST_LANES]
    drawn_endpoints = list(endpoints.items())[:MOST_LANES]
    most = MOST_SPANS // max(len(drawn_ranks) + len(drawn_endpoints), 1)
    updates = {
        lane: [s for s in spans if s.name not in (REQUEST, EVALUATION)]
        for lane, spans in lanes.items()
    }
    drawn: dict[str, Any] = {
        "seconds": _rounded(end_s - start_s),
        "ranks": [
            # by the names that the accounts have for them
            {"lane": lane, "spans": _longest(_renamed(spans), most, start_s)}
            for lane, spans in drawn_ranks
        ],
        "endpoints": [
            {
                "lane": lane,
                "spans": _longest(updates[lane], most, start_s),
                **_in_flight(spans, MOST_COUNTS // len(drawn_endpoints), start_s),
            }
            for lane, spans in drawn_endpoints
        ],
        "accounts": [
            {"lane": each.lane, "wall_s": _rounded(each.wall_s), "causes": _causes(each.causes)}
            for each in accounts[: 2 * MOST_LANES]
        ],
        "left_out": len(ranks) + len(endpoints) - len(drawn_ranks) - len(drawn_endpoints),
        "short_left_out": sum(
            max(len(updates[lane]) - most, 0) for lane, _ in drawn_ranks + drawn_endpoints
        ),
    }
    return packed(drawn)


def _renamed(spans: Sequence[Span]) -> list[Span]:
    return [msgspec.structs.replace(span, name=cause) for span, cause in with_causes(spans)]


def _longest(spans: Sequence[Span], most: int, start_s: float) -> list[list[str | float]]:
    longest = sorted(spans, key=lambda span: -span.seconds)[:most]
    return [
        [span.name, _rounded(span.start_s - start_s), _rounded(span.seconds)]
        for span in sorted(longest, key=lambda span: span.start_s)
    ]


def _in_flight(spans: Sequence[Span], most: int, start_s: float) -> dict[str, list[float]]:
    """The number of requests over time."""
    counts = in_flight(spans)
    times, numbers = downsampled([at_s for at_s, _ in counts], [n for _, n in counts], most)
    return {"times": [_rounded(at_s - start_s) for at_s in times], "in_flight": numbers}


def _causes(causes: dict[str, float]) -> dict[str, float]:
    return {name: _rounded(seconds) for name, seconds in causes.items() if seconds > 5e-4}


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
