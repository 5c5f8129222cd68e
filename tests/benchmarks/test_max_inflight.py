"""The benchmark of ``max_inflight: auto``: what it compares, and the object that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.max_inflight import CHOSE, Measurement, by_limit, chosen, limits_of, turns
from benchmarks.parts.end_to_end.rows import Key, Measured, Row, Rows, Step
from benchmarks.parts.end_to_end.workloads import WORKLOADS
from benchmarks.parts.max_inflight.rotating_trainer import NUM_UNCOUNTED, rotate
from easyrl.inference_client.pool import inflight_limits

SHORT, LONG_TAIL = WORKLOADS["short"], WORKLOADS["long tail"]
ALL = (16, 32, 64, 128, 256)


def test_numbers_that_are_one_and_the_same_are_run_once() -> None:
    assert limits_of(SHORT, ALL) == [16, 32, 64, 128, 256]
    assert limits_of(LONG_TAIL, ALL) == [16, 32, 256]  # 64 responses
    assert limits_of(LONG_TAIL, (8, 16)) == [8, 16]


def test_each_number_has_a_turn_in_each_round_and_none_is_always_first() -> None:
    assert turns([16, 32, 256], 4) == [16, 32, 256, 32, 256, 16, 256, 16, 32, 16, 32, 256]


def row(seconds: list[float], choice: int) -> Row:
    steps = [Step(each, {CHOSE: choice}, 0.0, 9.0) for each in seconds]
    return Row(Key("short", "ours", 0, len(steps)), Measured(steps))


def test_a_choice_is_one_of_the_numbers() -> None:
    assert chosen(row([1.0], 32), [16, 32, 64]) == 32
    assert chosen(row([1.0], 256), [16, 32, 64]) == 64  # above all responses
    with pytest.raises(RuntimeError, match="chose 8, .* add it to --limits"):
        chosen(row([1.0], 8), [16, 32, 64])


def test_batches_go_to_the_number_whose_turn_it_was() -> None:
    assert by_limit([16, 32, 32, 16, 16], row([1.0, 5.0, 7.0, 2.0, 9.0], 16)) == {16: 2.0, 32: 6.0}


def test_a_workload_is_compared_by_medians_with_its_best_number(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    measurement = Measurement(
        SHORT, tmp_path, tmp_path / "short", rows, [32, 256], 2, "halves", [], "r"
    )
    # of each run: what was chosen, and the steps in turn, 32, 256, 256, 32
    taken = [(32, [2.0, 3.0, 3.2, 2.2]), (256, [1.9, 2.5, 2.7, 2.1]), (32, [2.2, 9.0, 9.0, 2.0])]
    for repeat, (choice, seconds) in enumerate(taken):
        key = Key("short", "ours", repeat, 4, "halves 32 256 256 32", "r")
        measured = row(seconds, choice).measured
        rows.get(key, lambda measured=measured: measured)
    assert measurement.compare(3) == {
        "workload": "short",
        "auto_s": 2.1,  # of 2.1, 2.6, 2.1
        "best": 32,
        "best_s": 2.1,
        "ratio": 1.0,
        "ratio_in_a_run": 1.0,
        "chose": [32, 256, 32],
        "fixed_s": {"32": 2.1, "256": 3.1},
        "runs": 3,
    }


def test_the_trainer_s_limits_are_given_behind_the_first_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight_limits.InflightLimits, "end_batch", lambda self: None)
    limits = inflight_limits.InflightLimits("auto", 1)
    adaptive = SimpleNamespace(max_inflight=64, most=128, num_responses=0)
    limits._adaptive = {"endpoint": adaptive}  # type: ignore[dict-item]
    rotate(tmp_path / "choice.json", [16, 256, 32])
    limits.end_batch()  # the push before the first batch
    adaptive.num_responses = 8
    had = []
    for _ in range(NUM_UNCOUNTED + 3):
        had.append(adaptive.max_inflight)  # in this batch
        limits.end_batch()
    assert had == [64] * NUM_UNCOUNTED + [16, 128, 32]
    assert json.loads((tmp_path / "choice.json").read_text()) == [64]
