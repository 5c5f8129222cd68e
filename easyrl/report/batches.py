"""A batch of the timeline as the report draws it: few numbers, compressed."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import orjson

from easyrl.timeline.accounting import account
from easyrl.timeline.chrome_trace import in_flight
from easyrl.timeline.spans import BatchSpans, Span, by_lane, is_endpoint, is_rank

MOST_LANES = 12  # of each kind, that are drawn
MOST_SPANS = 1500  # of a lane: the longest
_REQUESTS = ("request", "evaluation")


def packed_batch(of_ranks: Sequence[BatchSpans]) -> str:
    """What is drawn of one batch: base64 of gzip of JSON.

    {"seconds", "ranks": [{"lane", "spans": [[name, start, seconds]]}], "endpoints": [{"lane",
    "spans", "times", "in_flight"}], "accounts": [{"lane", "wall_s", "causes"}], "left_out"}, in
    seconds from the batch's begin.
    """
    start_s = min(each.start_s for each in of_ranks)
    end_s = max(each.end_s for each in of_ranks)
    lanes = by_lane([span for each in of_ranks for span in each.spans if span.end_s > start_s])
    ranks = {lane: spans for lane, spans in lanes.items() if is_rank(lane)}
    endpoints = {lane: spans for lane, spans in lanes.items() if is_endpoint(lane)}
    left_out = max(len(ranks) - MOST_LANES, 0) + max(len(endpoints) - MOST_LANES, 0)
    drawn: dict[str, Any] = {
        "seconds": _rounded(end_s - start_s),
        "ranks": [
            {"lane": lane, "spans": _spans(spans, start_s)}
            for lane, spans in list(ranks.items())[:MOST_LANES]
        ],
        "endpoints": [
            {"lane": lane, **_endpoint(spans, start_s)}
            for lane, spans in list(endpoints.items())[:MOST_LANES]
        ],
        "accounts": [
            {"lane": each.lane, "wall_s": _rounded(each.wall_s), "causes": _causes(each.causes)}
            for each in account(of_ranks)[: 2 * MOST_LANES]
        ],
        "left_out": left_out,
    }
    return base64.b64encode(gzip.compress(orjson.dumps(drawn), mtime=0)).decode()


def _endpoint(spans: Sequence[Span], start_s: float) -> dict[str, Any]:
    """Updates of its weights as spans, its requests as a number over time."""
    updates = [span for span in spans if span.name not in _REQUESTS]
    counts = in_flight(spans)
    return {
        "spans": _spans(updates, start_s),
        "times": [_rounded(seconds - start_s) for seconds, _ in counts],
        "in_flight": [count for _, count in counts],
    }


def _spans(spans: Sequence[Span], start_s: float) -> list[list[str | float]]:
    longest = sorted(spans, key=lambda span: -span.seconds)[:MOST_SPANS]
    return [
        [span.name, _rounded(span.start_s - start_s), _rounded(span.seconds)]
        for span in sorted(longest, key=lambda span: span.start_s)
    ]


def _causes(causes: dict[str, float]) -> dict[str, float]:
    return {name: _rounded(seconds) for name, seconds in causes.items() if seconds > 5e-4}


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
