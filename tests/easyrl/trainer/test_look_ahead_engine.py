"""Batches on a real DeepSpeed engine are the same with look-ahead as without, up to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.easyrl.engines.engine_cases import prepare

ROOT = Path(__file__).parents[3]
CASES = (
    *("reference", "reference-tree", "lagged", "two-updates", "two-updates-alone"),
    *("lora", "truncated-masked", "ppo", "ppo-whitened"),
)
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("look-ahead")
    prepare(folder)
    inherited = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.easyrl.trainer.look_ahead_worker", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads((folder / "look-ahead.json").read_text())


def updates(results: Results, case: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each update what it came to without and with look-ahead."""
    both = results[case]["without"]["updates"], results[case]["with"]["updates"]
    return list(zip(*both, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_steps_and_metrics_are_the_same(results: Results, case: str) -> None:
    for without, with_ in updates(results, case):
        # fp32, rows of other shapes; measured 1e-6
        assert with_["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-5)
        assert without["grad_norm"] > 0.05
        # ppo's whitened advantages cancel: sums of some 200 terms of 1, each right to 2e-6
        rounding = 2e-6 * without["trained"] if "ppo" in case else 1e-4
        assert with_["sums"] == pytest.approx(without["sums"], rel=1e-5, abs=rounding)
        assert with_["maxima"] == pytest.approx(without["maxima"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_same_after_two_batches(results: Results, case: str) -> None:
    assert results[case]["weights"] < 1e-4, results[case]["weights"]  # measured 3e-6


@pytest.mark.parametrize("case", CASES)
def test_all_that_came_early_was_computed_ahead(results: Results, case: str) -> None:
    """But where there is nothing to compute: a first update without a reference."""
    for number, (without, with_) in enumerate(updates(results, case)):
        assert without["ahead"] == 0
        if case == "two-updates-alone" and number % 2 == 0:
            assert with_["ahead"] == 0
        else:
            assert 0 < with_["early"] <= with_["ahead"] <= with_["trained"]


@pytest.mark.parametrize("case", ["two-updates", "two-updates-alone"])
def test_the_old_policy_of_a_second_update_is_the_snapshot(results: Results, case: str) -> None:
    """Though in the first it was the policy, whose forward needs no other."""
    for number, (without, with_) in enumerate(updates(results, case)):
        is_first = number % 2 == 0
        nothing_frozen = is_first and case == "two-updates-alone"
        assert set(with_["without_old_policy"]) == (set() if nothing_frozen else {is_first})
        for update in (without, with_):
            ratio = update["sums"]["ratio_sum"] / update["trained"]
            assert (ratio == 1.0) is is_first
