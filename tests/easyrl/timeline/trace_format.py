"""What Google's "Trace Event Format" asks of the kinds of events that a trace of ours has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUIRED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "b": {"name", "cat", "id", "pid", "tid", "ts"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "args"},
}


def format_problems(trace: Mapping[str, Any]) -> list[str]:
    """What is wrong with a trace; nothing, if it keeps to the format."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is no list"]
    problems = []
    begun: dict[tuple, float] = {}
    complete: dict[tuple, list[tuple[float, float]]] = {}
    for event in events:
        kind = event.get("ph")
        if kind not in REQUIRED:
            problems.append(f"ph {kind!r} is no kind of event")
            continue
        if missing := REQUIRED[kind] - event.keys():
            problems.append(f"{event} lacks {sorted(missing)}")
            continue
        if any(
            isinstance(event[key], bool) or event[key] < 0 for key in ("ts", "dur") if key in event
        ):
            problems.append(f"{event} has a negative time")
        if kind == "C" and not all(isinstance(v, int | float) for v in event["args"].values()):
            problems.append(f"{event} counts no numbers")
        if kind == "X":
            thread = complete.setdefault((event["pid"], event["tid"]), [])
            thread.append((event["ts"], event["ts"] + event["dur"]))
        if kind in "be":
            key = (event["cat"], event["id"], event["name"])
            if kind == "b":
                begun[key] = event["ts"]
            elif event["ts"] < begun.pop(key, float("inf")):
                problems.append(f"{event} ends before it begins")
    problems += [f"{key} never ends" for key in begun]
    for thread, spans in complete.items():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start + 0.2:  # times are rounded to a tenth of a microsecond
                ends.pop()
            if ends and end > ends[-1] + 0.2:
                problems.append(f"thread {thread}: {start} to {end} is not nested")
            ends.append(end)
    return problems
