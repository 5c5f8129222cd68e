"""Borders between batches in the spans of a traced run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STEP, SETTLE = "clip and Adam", "settle: canary passed"
POINTS = ("request", "accumulate", "micro-batch")


@dataclass(frozen=True)
class Span:
    name: str
    start: float  # seconds
    end: float
    thread: str  # "main", or "loop": the producer's


@dataclass(frozen=True)
class Border:
    """From the end of a batch's last micro-batch to the first request of the next, seconds."""

    whole: float
    step: float  # of it clip and Adam
    handed_out: float  # until responses are: they wait for the canary, where it runs beside them
    spans: tuple[Span, ...]  # their times count from its beginning

    @property
    def rest(self) -> float:
        """The critical path without clip and Adam."""
        return self.whole - self.step

    @property
    def to_responses(self) -> float:
        """Until responses may be handed out, without clip and Adam: what the batch waits for."""
        return self.handed_out - self.step


@dataclass(frozen=True)
class Row:
    """A span of most borders, medians in seconds."""

    name: str
    thread: str
    start: float
    seconds: float


def read_borders(path: Path) -> list[Border]:
    """All borders of a run, without the first, behind which everything is done for the first time.

    One that has no next batch is none.
    """
    spans = sorted(
        (Span(**json.loads(line)) for line in path.read_text().splitlines()),
        key=lambda span: span.start,
    )
    borders = []
    steps = [number for number, span in enumerate(spans) if span.name == STEP]
    for number in steps:
        # Behind it groups without signal may have been waited for, which are not run.
        start = max(s.end for s in spans[:number] if s.name == "accumulate")
        request = next((s for s in spans[number:] if s.name == "request"), None)
        if request is None:
            continue
        following = next((n for n in steps if n > number), len(spans))
        settled = (s.end for s in spans[number:following] if s.name == SETTLE)
        handed_out = max(request.start, next(settled, request.start))
        inside = tuple(
            Span(s.name, s.start - start, s.end - start, s.thread)
            for s in spans
            if start <= s.end and s.start < request.start + 0.5 and s.start >= start - 0.05
            if s.name not in POINTS
        )
        step = sum(s.end - s.start for s in inside if s.name == STEP and s.start < request.start)
        borders.append(Border(request.start - start, step, handed_out - start, inside))
    return borders[1:]


def rows(borders: Sequence[Border]) -> list[Row]:
    """What happens in which order; several spans of a name in one border are counted in turn."""
    found: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for border in borders:
        count: defaultdict[str, int] = defaultdict(int)
        for span in border.spans:
            count[span.name] += 1
            suffix = "" if count[span.name] == 1 else f" ({count[span.name]})"
            found[span.name + suffix, span.thread].append(span)
    medians = [
        Row(
            name,
            thread,
            statistics.median(s.start for s in spans),
            statistics.median(s.end - s.start for s in spans),
        )
        for (name, thread), spans in found.items()
        if 2 * len(spans) > len(borders)
    ]
    return sorted(medians, key=lambda row: row.start)
