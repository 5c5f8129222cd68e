"""The trace keeps to the format: required fields, microseconds, nesting, matched begin and end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from easyrl.timeline.chrome_trace import in_flight, newest_batches, trace_events, write_trace
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import Span
from tests.easyrl.timeline.made_spans import ENDPOINTS, TRAINER, A, batch, requests
from tests.easyrl.timeline.trace_format import format_problems

SPANS = [*TRAINER, *ENDPOINTS]


def test_a_trace_keeps_to_the_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    written = write_trace(path, [batch(SPANS, 10.0)])
    trace = json.loads(path.read_text())
    assert len(trace["traceEvents"]) == written.num_events and format_problems(trace) == []
    assert written.num_left_out == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_has_each_span_with_its_time_in_microseconds() -> None:
    events = list(trace_events(SPANS))
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == len(TRAINER) and kinds["b"] == kinds["e"] == len(ENDPOINTS)
    lanes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    (step,) = (e for e in events if e["name"] == "step")
    assert (step["ts"], step["dur"], step["pid"]) == (9e6, 0.5e6, lanes["rank 0"])
    (push,) = (e for e in events if e["name"] == "push" and e["ph"] == "b")
    (end,) = (e for e in events if e.get("id") == push["id"] and e["ph"] == "e")
    assert (push["ts"], end["ts"], push["pid"]) == (9.5e6, 9.8e6, lanes[A])


def test_the_checker_finds_what_is_wrong() -> None:
    good = {"name": "a", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 10}
    for wrong in (
        [{**good, "dur": -1}],
        [{key: value for key, value in good.items() if key != "ts"}],
        [good, {**good, "ts": 5}],  # ends behind the one that it begins in
        [{**good, "ph": "b", "id": 1, "cat": "a"}],  # never ends
        [{**good, "ph": "?"}],
    ):
        assert format_problems({"traceEvents": wrong}), wrong
    assert format_problems({"events": []})


def test_requests_in_flight_are_counted() -> None:
    spans = requests(A, (0.0, 2.0), (1.0, 3.0), (2.0, 4.0))
    assert in_flight(spans) == [(0.0, 1), (1.0, 2), (2.0, 2), (3.0, 1), (4.0, 0)]


@pytest.mark.parametrize(("most", "found"), [(1, [2]), (75, [1, 2]), (10_000, [0, 1, 2])])
def test_the_newest_batches_that_fit_are_in_it(tmp_path: Path, most: int, found: list[int]) -> None:
    folder = TimelineFolder(tmp_path)
    for number in range(3):
        folder.write(batch(SPANS[:12], 10.0, number))
    assert [each.batch for each in newest_batches(folder, most)] == found


def test_what_fails_is_in_flight_until_it_does() -> None:
    spans = [*requests(A, (1.0, 4.0)), *requests(A, (2.0, 3.0), name="failed request")]
    assert in_flight(spans) == [(1.0, 1), (2.0, 2), (3.0, 1), (4.0, 0)]


def test_one_batch_with_more_than_a_browser_opens_keeps_phases_and_the_longest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    many = requests(A, *((0.5 + number / 1000, 1.0 + number / 500) for number in range(1000)))
    whole = batch([*TRAINER, *many, Span(A, "push", 9.5, 9.501)], 10.0)
    written = write_trace(path, [whole], most_events=200)
    trace = json.loads(path.read_text())
    assert format_problems(trace) == [] and written.num_events <= 200
    events = trace["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    num_requests = sum(event["ph"] == "b" and event["name"] == "request" for event in events)
    assert kinds["X"] == len(TRAINER) and 40 <= num_requests < 50
    assert any(event["name"] == "push" for event in events)  # the shortest of all
    shortest = many[-num_requests].seconds  # the later ones are the longer ones
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "b" and e["name"] == "request"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e" and e["name"] == "request"}
    assert min(ends[key] - starts[key] for key in starts) == pytest.approx(1e6 * shortest, abs=1)
    assert kinds["C"] == 0  # a count of some
    assert written.num_left_out == trace["otherData"]["spans left out"] == 1000 - num_requests
    assert write_trace(path, [whole], most_events=None).num_left_out == 0
