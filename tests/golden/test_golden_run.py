"""The golden run gives what it gave: bits on a machine that computes alike, nearly on any other.

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

from tests.golden.comparison import FIGURES_TOLERANCE, assert_as_kept, far_figures
from tests.golden.golden_run import GOLDEN, WEIGHTS_TOLERANCE

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
    assert not far_figures(now["steps"], golden["steps"], tolerance=FIGURES_TOLERANCE)
    steps = golden["steps"]
    assert len(steps) == 4
    # what is compared is not all zero
    assert any(step["clip_high"] > 0 for step in steps)
    assert all(step["kl"] > 0.1 and abs(step["loss"]) > 1e-3 for step in steps)


def test_the_run_is_the_one_that_was_kept(now: dict[str, Any], golden: dict[str, Any]) -> None:
    assert_as_kept(now, golden, weights_tolerance=WEIGHTS_TOLERANCE)
