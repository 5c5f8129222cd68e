"""Rows of the paper's tables: ratios and bounds by hand, and its own figures among each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parts.paper import figures
from benchmarks.parts.paper.baseline import Baseline
from benchmarks.parts.paper.finished_run import FinishedRun, read_run
from benchmarks.parts.paper.rows import Row, as_text
from benchmarks.parts.paper.sides import Side, in_turns
from benchmarks.parts.paper.startup import measured_startup, training_begins_s
from benchmarks.parts.paper.tables import (
    large_model_rows,
    overlap_rows,
    scaling_rows,
    shared_prompt_rows,
)

G = 4


def step(
    seconds: float, *, generation: float = 0.0, training: float = 0.0, packed: float = 100.0
) -> dict[str, float]:
    """Of 400 sequence tokens: 10 of prompts, 4 times, and 360 of responses."""
    return {
        "time/step_s": seconds,
        "time/batch_s": generation + training + 1,
        "time/last_group_s": generation,
        "time/optimizer_s": 1.0,
        "time/train_s": training,
        "tokens/prompt": 10.0,
        "tokens/response": 360.0,
        "tokens/packed": packed,
    }


def run(*steps: dict[str, float], devices: int = 2) -> FinishedRun:
    return FinishedRun(Path("run"), steps, G, devices)


def test_the_papers_throughput_is_its_tokens_by_hours_and_devices() -> None:
    of_tables = (
        figures.MINDSPEED_8B,
        figures.SYNC_8B,
        figures.ASYNC_8B,
        figures.MINDSPEED_32B,
        figures.ASYNC_32B,
    )
    for row in of_tables:
        assert row.trained_tokens / row.hours / 3600 / row.devices == pytest.approx(
            row.tpspd, rel=2e-4
        )
    assert figures.ASYNC_8B.tpspd / figures.SYNC_8B.tpspd == pytest.approx(1.92, abs=5e-3)
    assert figures.speed_up(32) == pytest.approx(1.83, abs=5e-3)
    assert figures.speed_up(64) / figures.speed_up(32) == pytest.approx(1.90, abs=5e-3)


def test_throughput_counts_a_prompt_for_each_response() -> None:
    measured = run(step(5), step(3), devices=4)
    assert measured.tokens == 800 and measured.seconds == 8
    assert measured.tpspd == pytest.approx(800 / 8 / 4)


def test_the_bound_hides_the_shorter_phase() -> None:
    # 6 + 4 of generation and training, 2 of all else; then 3 + 5 and 1
    sync = run(step(12, generation=6, training=4), step(9, generation=3, training=5))
    assert sync.overlap_bound == pytest.approx(21 / (8 + 6))
    assert run(step(11, generation=5, training=5)).overlap_bound == pytest.approx(11 / 6)
    # evaluation or a slow optimizer step: nothing left to hide, and no bound below one
    assert run(step(9, generation=8, training=-1)).overlap_bound == 1


def test_rows_of_sync_and_async() -> None:
    phases = {"generation": 6.0, "training": 4.0}
    runs = {
        "sync": [run(step(10, **phases)), run(step(20, **phases)), run(step(12, **phases))],
        "async": [run(step(5)), run(step(10)), run(step(12))],
    }
    rows = overlap_rows(runs, [Baseline("verl", 5.0)])
    assert [row.name for row in rows] == ["verl", "sync", "async"]
    assert rows[0].ratio == pytest.approx(5 / (400 / 12 / 2))
    assert rows[0].paper_ratio == pytest.approx(61.641 / 99.966)
    assert rows[1].tpspd == pytest.approx(400 / 12 / 2) and rows[1].ratio == 1
    assert rows[2].ratio == 2  # of pairs 2, 2 and 1
    assert rows[2].paper_ratio == pytest.approx(192.259 / 99.966)
    assert rows[2].bound == pytest.approx(12 / 8)  # of 10/6, 20/16 and 12/8


def test_a_large_model_is_compared_with_a_baseline_where_there_is_one() -> None:
    runs = {"async": [run(step(4))]}
    (alone,) = large_model_rows(runs, [])
    assert (alone.tpspd, alone.ratio, alone.bound) == (50, None, None)
    theirs, ours = large_model_rows(runs, [Baseline("verl", 10.0)])
    assert (theirs.ratio, ours.ratio) == (1, 5)
    assert ours.paper_ratio == pytest.approx(33.449 / 6.627)


def test_scaling_is_in_tokens_per_second_of_all_devices() -> None:
    runs = {
        "16 devices": [run(step(8), devices=16)],
        "32 devices": [run(step(5), devices=32)],
        "64 devices": [run(step(2), devices=64)],
    }
    rows = scaling_rows(runs, [])
    assert [row.ratio for row in rows] == [1, pytest.approx(8 / 5), 4]
    assert [row.bound for row in rows] == [1, 2, 4]
    assert [row.tpspd for row in rows] == [400 / 8 / 16, 400 / 5 / 32, 400 / 2 / 64]
    assert rows[2].paper_ratio == pytest.approx(163.208 * 4 / 188.162)


def test_sharing_is_bounded_by_the_tokens_that_it_saves() -> None:
    runs = {
        "unshared": [run(step(9, training=6.0, packed=400))],
        "shared": [run(step(6, training=2.0, packed=160))],
    }
    separate, shared = shared_prompt_rows(runs, [])
    assert separate.bound == 1 and shared.bound == pytest.approx(400 / 160)
    assert shared.ratio == pytest.approx(1.5) and shared.more == {"training_ratio": 3}
    verl, *own = shared_prompt_rows(runs, [Baseline("verl", 11.0)])
    assert own == [separate, shared]
    assert (verl.tpspd, verl.bound) == (11, None)
    assert verl.ratio == pytest.approx(11 / (400 / 9 / 2))


def test_startup_is_measured_from_the_first_request(tmp_path: Path) -> None:
    events = [
        (1, "sync_end"),
        (2, "batch_dispatched"),
        (5, "group_ready"),
        (6, "micro_batch_start"),
        (7, "micro_batch_end"),
        (8, "micro_batch_start"),
        (20, "batch_dispatched"),
        (21, "micro_batch_start"),
    ]
    lines = [json.dumps({"t": t, "event": event}) for t, event in events]
    (tmp_path / "events-rank0.jsonl").write_text("\n".join(lines))
    assert list(training_begins_s(tmp_path)) == [4, 1]
    with pytest.raises(ValueError, match=r"timeline\.keep"):
        measured_startup(FinishedRun(tmp_path, [step(1)], G, 2))


def test_evaluations_and_first_steps_are_not_counted(tmp_path: Path) -> None:
    lines = [step(9), {"eval/accuracy": 0.5}, step(4)]
    written = [json.dumps({"step": n} | line) + "\n" for n, line in enumerate(lines)]
    (tmp_path / "metrics.jsonl").write_text("".join(written))
    assert read_run(tmp_path, G, 2, skip=1).seconds == 4
    with pytest.raises(ValueError, match=r"metrics\.jsonl: has no step behind the first 2"):
        read_run(tmp_path, G, 2, skip=2)


class Recorder:
    note = ""

    def __init__(self) -> None:
        self.folders: list[str] = []

    def run(self, side: Side, run_dir: Path) -> FinishedRun:
        self.folders.append(run_dir.name)
        return run(step(1))


def test_sides_take_turns_and_who_begins_changes(tmp_path: Path) -> None:
    bench = Recorder()
    runs = in_turns(bench, [Side("a"), Side("b c")], 2, tmp_path)
    assert bench.folders == ["a-0", "b-c-0", "b-c-1", "a-1"]
    assert {name: len(own) for name, own in runs.items()} == {"a": 2, "b c": 2}


def test_rows_say_what_there_is_nothing_of() -> None:
    row = Row("alone", 1234.5678, more={"measured_s": 0.123456})
    assert row.as_json() == {
        "name": "alone",
        "tpspd": 1235,
        "ratio": None,
        "paper_ratio": None,
        "bound": None,
        "measured_s": 0.1235,
    }
    assert "alone" in as_text([row]) and "-" in as_text([row])
