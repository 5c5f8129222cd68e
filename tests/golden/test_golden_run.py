"""The golden run gives what it gave: figures on any machine, bits on one that computes alike.

A change that is meant to change numbers rewrites them (see ``golden_run.py``) and says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.golden_run import GOLDEN

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    inherited = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    result = subprocess.run(
        [sys.executable, "-m", "tests.golden.golden_run"],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_losses_and_what_the_objective_counted(now: dict[str, Any], golden: dict[str, Any]) -> None:
    # in float32, summed in another order; a loss is a sum of terms of order 1 that cancel. The
    # smallest and the largest instruction sets differ by 3e-7.
    expected = [pytest.approx(step, rel=1e-6, abs=1e-6) for step in golden["steps"]]
    assert now["steps"] == expected
    assert len(expected) == 4
    # what is compared is not all zero
    assert any(step["clip_high"] > 0 for step in golden["steps"])
    assert all(step["kl"] > 0.1 and abs(step["loss"]) > 1e-3 for step in golden["steps"])


def test_bits(now: dict[str, Any], golden: dict[str, Any]) -> None:
    if now["arithmetic"] != golden["arithmetic"]:
        pytest.skip(f"computes with {now['arithmetic']}, was kept with {golden['arithmetic']}")
    assert now["steps"] == golden["steps"]
    assert now["weights"] == golden["weights"]
