"""The benchmark of ``max_inflight: auto``: what it compares, and the object that it prints."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from benchmarks.max_inflight import Measurement, chosen, limits_of, still_in
from benchmarks.parts.end_to_end.rows import Key, Measured, Rows, Step
from benchmarks.parts.end_to_end.workloads import WORKLOADS

SHORT, LONG_TAIL = WORKLOADS["short"], WORKLOADS["long tail"]
ALL = (16, 32, 64, 128, 256)


def test_numbers_that_are_one_and_the_same_are_run_once() -> None:
    assert limits_of(SHORT, ALL) == [16, 32, 64, 128, 256]
    assert limits_of(LONG_TAIL, ALL) == [16, 32, 256]  # 64 responses
    assert limits_of(LONG_TAIL, (8, 16)) == [8, 16]


def write_events(run_dir: Path, *choices: int) -> None:
    run_dir.mkdir(parents=True)
    events = [{"event": "batch_dispatched"}]
    events += [{"event": "max_inflight_chosen", "max_inflight": each} for each in choices]
    (run_dir / "events-rank0.jsonl").write_bytes(b"".join(orjson.dumps(e) + b"\n" for e in events))


def test_the_last_choice_is_the_one_that_held(tmp_path: Path) -> None:
    write_events(tmp_path / "a", 256, 64)
    write_events(tmp_path / "b")
    assert (chosen(tmp_path / "a"), chosen(tmp_path / "b")) == (64, 256)


def test_a_workload_is_compared_by_medians_with_its_best_number(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    taken = {"32": [3.0, 1.0, 2.0], "256": [2.5, 2.2, 9.0], "auto": [2.2, 2.1, 2.3]}
    for side, repeats in taken.items():
        for repeat, seconds in enumerate(repeats):
            steps = [Step(seconds + spread, {"wait": 0.1}, 0.0, 9.0) for spread in (-1, 0, 5)]
            rows.get(Key("short", side, repeat, 3, "halves"), lambda steps=steps: Measured(steps))
    for repeat in range(3):
        write_events(tmp_path / "short" / f"run-auto-{repeat}", 256, 32 * (1 + repeat % 2))
    measurement = Measurement(SHORT, tmp_path, tmp_path / "short", rows, [32, 256], 3, "halves", [])
    assert measurement.compare(3) == {
        "workload": "short",
        "auto_s": 2.2,
        "best": 32,
        "best_s": 2.0,
        "ratio": pytest.approx(1.1),
        "chose": [32, 64, 32],
        "fixed_s": {"32": 2.0, "256": 2.5},
        "runs": {"32": 3, "256": 3, "auto": 3},
    }


def test_a_number_that_cannot_become_the_best_is_left_out() -> None:
    taken = {"16": [4.0, 2.5], "32": [2.0, 2.2], "256": [2.0, 9.0], "auto": [5.0, 5.0]}
    assert still_in(taken) == ["32", "256", "auto"]  # 2.5 > 1.15 x 2.1


def test_what_is_left_out_keeps_its_runs(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    taken = {"32": [2.0, 2.0, 2.0], "256": [3.0, 3.1], "auto": [2.0, 2.0, 2.0]}
    for side, repeats in taken.items():
        for repeat, seconds in enumerate(repeats):
            steps = [Step(seconds, {"wait": 0.1}, 0.0, 9.0)]
            rows.get(Key("short", side, repeat, 1, "halves"), lambda steps=steps: Measured(steps))
    for repeat in range(3):
        write_events(tmp_path / "short" / f"run-auto-{repeat}", 32)
    measurement = Measurement(SHORT, tmp_path, tmp_path / "short", rows, [32, 256], 1, "halves", [])
    compared = measurement.compare(3)
    assert compared["runs"] == {"32": 3, "256": 2, "auto": 3}
    assert compared["fixed_s"] == {"32": 2.0, "256": 3.05}
