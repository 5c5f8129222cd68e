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
from typing import Any

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
    is_models,
    is_rank,
    spans_of,
)

FILE = "trace.json"  # in the run's folder
MOST_EVENTS = 200_000  # about 25 MB, which a browser opens in seconds
_US = 1e6


def trace_events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """The events of ``spans``, in microseconds from the first one's start."""
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
        if is_endpoint(lane):
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
        if span.name in (REQUEST, EVALUATION, FAILED):
            changes[span.start_s] = changes.get(span.start_s, 0) + 1
            changes[span.end_s] = changes.get(span.end_s, 0) - 1
    counts, count = [], 0
    for seconds, change in sorted(changes.items()):
        count += change
        counts.append((seconds, count))
    return counts


def write_trace(path: Path, batches: Sequence[BatchSpans]) -> int:
    """Writes a trace of ``batches``, of any ranks; the number of its events. Raises ``OSError``."""
    events = list(trace_events(spans_of(batches)))
    write_whole(path, orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)


def newest_batches(folder: TimelineFolder, most_events: int = MOST_EVENTS) -> list[BatchSpans]:
    """The newest batches of all ranks that fit into a trace; at least one, if there is any."""
    newest: list[list[BatchSpans]] = []
    num_events = 0
    for batch in reversed(folder.batches()):
        of_ranks = folder.read(batch)
        num_events += sum(3 * len(each.spans) for each in of_ranks)
        if newest and num_events > most_events:
            break
        newest.append(of_ranks)
    return [each for of_ranks in reversed(newest) for each in of_ranks]
