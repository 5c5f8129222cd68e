"""The border between batches: its points in a run's spans, and names that no checkout has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.batch_border import refuse_unknown
from benchmarks.parts.batch_border.borders import SETTLE, STEP, read_borders, rows
from benchmarks.parts.batch_border.traced_trainer import TRACED, Spans, trace
from benchmarks.parts.same_as_before.side import Failed

Spanned = list[tuple[str, float, float]]


def written(path: Path, spans: Spanned) -> Path:
    path.write_text(
        "".join(
            json.dumps({"name": name, "start": start, "end": end, "thread": "main"}) + "\n"
            for name, start, end in spans
        )
    )
    return path


def batch(start: float, settled: float | None = None) -> Spanned:
    """Ten seconds, from the first request; the last micro-batch ends behind 8 of them."""
    spans = [("request", start, start), ("accumulate", start + 1, start + 8)]
    if settled is not None:
        spans.append((SETTLE, start + 0.01, start + settled))
    return [*spans, (STEP, start + 8.1, start + 8.4), ("publish, all", start + 8.5, start + 9.5)]


def test_a_border_is_from_the_last_micro_batch_to_the_next_request(tmp_path: Path) -> None:
    spans = [*batch(0.0), *batch(10.0), *batch(20.0)]
    (border,) = read_borders(written(tmp_path / "spans.jsonl", spans))  # the first is left out
    assert (border.whole, border.step, border.rest) == pytest.approx((2.0, 0.3, 1.7))
    assert border.to_responses == pytest.approx(1.7)  # the canary came before
    assert {row.name: round(row.start, 3) for row in rows([border])} == {
        STEP: 0.1,
        "publish, all": 0.5,
    }


def test_responses_wait_for_a_canary_beside_the_requests(tmp_path: Path) -> None:
    spans = [*batch(0.0, 0.1), *batch(10.0, 0.4), *batch(20.0, 0.7), *batch(30.0, 5.0)]
    borders = read_borders(written(tmp_path / "spans.jsonl", spans))
    assert [border.rest for border in borders] == pytest.approx([1.7, 1.7])
    # that of the batch behind each border, not of the one before it
    assert [border.to_responses for border in borders] == pytest.approx([2.4, 6.7])


def test_a_name_that_neither_side_has_ends_the_benchmark() -> None:
    refuse_unknown({"before": ["a:b", "a:new"], "after": ["a:old"]})
    with pytest.raises(Failed, match="neither checkout has a:b"):
        refuse_unknown({"before": ["a:b", "a:new"], "after": ["a:b"]})


def test_what_is_traced_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this checkout all but what only earlier ones have."""
    monkeypatch.setattr(Spans, "around", lambda self, name, function: function)
    assert trace(Spans(tmp_path / "spans.jsonl")) == ["easyrl.trainer.loop:Trainer._close"]
    assert SETTLE in TRACED.values() and STEP in TRACED.values()
