"""Spans of a batch that is easily followed: two endpoints, one rank, four groups."""

from __future__ import annotations

from collections.abc import Sequence

from easyrl.timeline.spans import BatchSpans, Span

A, B = "endpoint http://a:1", "endpoint http://b:1"


def phases(*named: tuple[str, float], start_s: float = 0.0, lane: str = "rank 0") -> list[Span]:
    """Name and seconds of each phase, one behind the other."""
    spans = []
    for name, seconds in named:
        spans.append(Span(lane, name, start_s, start_s + seconds))
        start_s += seconds
    return spans


def requests(lane: str, *times: tuple[float, float], name: str = "request") -> list[Span]:
    return [Span(lane, name, start, end, {"response_tokens": 5}) for start, end in times]


def batch(spans: Sequence[Span], end_s: float, number: int = 0, rank: int = 0) -> BatchSpans:
    return BatchSpans(number, rank, 0.0, end_s, list(spans))


# begin 1, waits 2 for the first group, trains 3, waits 1, trains 2, step 0.5, sync 0.5
TRAINER = phases(
    ("begin", 1), ("wait", 2), ("train", 3), ("wait", 1), ("train", 2), ("step", 0.5), ("sync", 0.5)
)
ENDPOINTS = [
    *requests(A, (0.5, 3.0), (1.0, 4.0), (5.0, 6.0)),
    *requests(B, (0.5, 2.0), (2.0, 7.0)),
    *requests(B, (7.0, 7.5), name="evaluation"),
    Span(A, "push", 9.5, 9.8),
    Span(A, "proof", 9.8, 10.0),
]
