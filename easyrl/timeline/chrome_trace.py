"""Spans in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens.

Each lane is a process of the trace. The phases of a rank's trainer thread follow one another, and
so do its models' forwards and backwards: they are complete events ("X"). What overlaps in a lane,
requests and rewards, are async events ("b" and "e" with an id), and a counter ("C") says how many
of an endpoint's requests are in flight.
Format: "Trace Event Format", Google, sections "Complete Events", "Async Events", "Counter Events"
and "Metadata Events".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from easyrl.runtime.whole_files import write_whole
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import (
    EVALUATION,
    FAILED,
    REQUEST,
    BatchSpans,
    Span,
    by_lane,
    is_endpoint,
    is_essential,
    is_models,
    is_rank,
    spans_of,
)

FILE = "trace.json"  # in the run's folder
MOST_EVENTS = 200_000  # about 25 MB, which a browser opens in seconds
_EVENTS_OF_A_REQUEST = 4  # begin, end, and the counter at both
_IN_FLIGHT = (REQUEST, EVALUATION, FAILED)
_US = 1e6


class Written(NamedTuple):
    """What is in a trace."""

    num_events: int
    num_left_out: int  # spans, beyond the bound of the trace or of the recorder


def trace_events(spans: Sequence[Span], *, counts: bool = True) -> Iterator[dict[str, Any]]:
    """The events of ``spans``, in microseconds from the first one's start.

    ``counts``: with the requests in flight, which are wrong where some are left out.
    """
    origin_s = min((span.start_s for span in spans), default=0.0)
    ids = itertools.count(1)

    def at(seconds: float) -> float:
        return round((seconds - origin_s) * _US, 1)

    for pid, (lane, own) in enumerate(by_lane(spans).items(), start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": lane}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": pid,
            "tid": 0,
            "args": {"sort_index": pid},
        }
        if is_rank(lane):
            name = {"name": "trainer thread"}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": name}
        for span in own:
            common = {"name": span.name, "cat": span.name, "pid": pid, "tid": 1}
            start, end = at(span.start_s), at(span.end_s)
            if is_rank(lane) or is_models(lane):
                duration = round(end - start, 1)
                yield {**common, "ph": "X", "ts": start, "dur": duration, "args": span.args}
            else:
                number = next(ids)
                yield {**common, "ph": "b", "id": number, "ts": start, "args": span.args}
                yield {**common, "ph": "e", "id": number, "ts": end}
        if is_endpoint(lane) and counts:
            for seconds, count in in_flight(own):
                yield {
                    "ph": "C",
                    "name": "requests in flight",
                    "pid": pid,
                    "tid": 0,
                    "ts": at(seconds),
                    "args": {"requests": count},
                }


def in_flight(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """When the number of an endpoint's requests changes, seconds, and what it is from then on."""
    changes: dict[float, int] = {}
    for span in spans:
        if span.name in _IN_FLIGHT:
            changes[span.start_s] = changes.get(span.start_s, 0) + 1
            changes[span.end_s] = changes.get(span.end_s, 0) - 1
    counts, count = [], 0
    for seconds, change in sorted(changes.items()):
        count += change
        counts.append((seconds, count))
    return counts


def write_trace(
    path: Path, batches: Sequence[BatchSpans], most_events: int | None = MOST_EVENTS
) -> Written:
    """Writes a trace of ``batches``, of any ranks. Raises ``OSError``.

    Beyond ``most_events`` (None: there is no bound) spans are left out, the shortest first, but for
    the trainer's phases and models and the endpoints' updates; how many, the trace says itself.
    """
    spans = spans_of(batches)
    kept = spans if most_events is None else _longest(spans, most_events)
    left_out = len(spans) - len(kept) + sum(each.left_out for each in batches)
    events = list(trace_events(kept, counts=not left_out))
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"spans left out": left_out},
    }
    write_whole(path, orjson.dumps(trace))
    return Written(len(events), left_out)


def _longest(spans: Sequence[Span], most_events: int) -> list[Span]:
    """As many of ``spans`` as have ``most_events``: the essential ones first, then the longest."""
    if sum(map(_num_events, spans)) <= most_events:
        return list(spans)
    kept, num_events = [], 0
    for span in sorted(spans, key=lambda s: (not is_essential(s.lane, s.name), -s.seconds)):
        num_events += _num_events(span)
        if num_events > most_events:
            break
        kept.append(span)
    return kept


def _num_events(span: Span) -> int:
    """At most, without those that name its lane."""
    if is_rank(span.lane) or is_models(span.lane):
        return 1
    return _EVENTS_OF_A_REQUEST if span.name in _IN_FLIGHT else 2


def newest_batches(folder: TimelineFolder, most_events: int = MOST_EVENTS) -> list[BatchSpans]:
    """The newest batches of all ranks that fit into a trace; at least one, if there is any."""
    newest: list[list[BatchSpans]] = []
    num_events = 0
    for batch in reversed(folder.batches()):
        of_ranks = folder.read(batch)
        num_events += sum(map(_num_events, spans_of(of_ranks)))
        if newest and num_events > most_events:
            break
        newest.append(of_ranks)
    return [each for of_ranks in reversed(newest) for each in of_ranks]
