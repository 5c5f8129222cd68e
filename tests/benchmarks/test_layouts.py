"""Split models against the whole one; what the benchmark takes for a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts import problems
from benchmarks.parts.layouts.cases import cases
from benchmarks.parts.layouts.traps import TRAPS

ROOT = Path(__file__).parents[2]
TWO_PROCESSES = ["tp2", "tp2sp", "pp2", "pp2-flush", "pp2-interleaved", "pp-uneven"]
FOUR_PROCESSES = ["tp2pp2", "tp2dp2-zero3"]
SLOW = ["tp4", "pp4", "tp2dp2-zero1", "tp2dp2-zero2", "pp2dp2-zero1", "dp4"]
GOOD: dict[str, Any] = {
    "name": "tp2",
    "dtype": "fp32",
    "tied": True,
    "logprob_err": 1e-6,
    "grad_err": 1e-6,
    "grad_norm_err": 1e-6,
    "step2_err": 1e-7,
    "params_compared": 46,
    "params_total": 46,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprob_err": 2e-5},
        {"grad_err": 2e-4},
        {"grad_norm_err": 2e-4},
        {"step2_err": 2e-5},
        {"grad_err": float("nan")},
        {"params_compared": 45},
        {"dtype": "bf16", "grad_norm_err": 0.03},
    ],
    ids=str,
)
def test_what_is_over_its_limit_is_told(wrong: dict[str, Any]) -> None:
    assert not problems(GOOD)
    assert len(problems(GOOD | wrong)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [TWO_PROCESSES, FOUR_PROCESSES],
    ids=["two", "four"],
)
def test_a_split_model_is_the_whole_one(tmp_path: Path, names: list[str]) -> None:
    compare(tmp_path, names)


@pytest.mark.slow
def test_each_other_layout_is_the_whole_model(tmp_path: Path) -> None:
    compare(tmp_path, SLOW)


def test_no_layout_is_left_out() -> None:
    assert {case.name for case in cases()} == {*TWO_PROCESSES, *FOUR_PROCESSES, *SLOW}


def compare(tmp_path: Path, names: list[str]) -> None:
    """Runs the benchmark on some layouts, and looks at its rows."""
    command = [sys.executable, "-m", "benchmarks.layouts", "--only", *names]
    finished = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = json.loads(finished.stdout.splitlines()[-1])["layouts"]
    assert {row["name"] for row in rows} == set(names)
    assert {row["tied"] for row in rows} == {True, False}
    assert all(row["groups_per_row"] > 1 and row["updates"] == 2 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("trap", TRAPS)
def test_a_planted_mistake_is_found(tmp_path: Path, trap: str) -> None:
    command = [sys.executable, "-m", "benchmarks.layouts", "--break", trap, "--out", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 3, finished.stdout + finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1])["layouts"]
