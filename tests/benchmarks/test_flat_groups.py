"""The benchmark of groups without signal says what the skip is worth, and that nothing changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.flat_groups import SHARES, random_groups
from tests.end_to_end.trainer_run import ROOT


@pytest.mark.parametrize("share", SHARES)
def test_groups_differ_in_their_rewards_alone(share: float) -> None:
    groups, others = random_groups(20, share), random_groups(20, 0.0)
    assert sum(np.ptp(group.rewards) == 0 for group in groups) == round(20 * share)
    for group, other in zip(groups, others, strict=True):
        pairs = zip(group.completions, other.completions, strict=True)
        assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs)


def last_line(*arguments: str) -> str:
    """Of a process of its own, as DeepSpeed wants it."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


@pytest.mark.runs
def test_the_last_line() -> None:
    result = json.loads(
        last_line("-m", "benchmarks.flat_groups", "--prompts", "10", "--repeats", "1")
    )
    assert [row["flat"] for row in result["rows"]] == list(SHARES)
    ratios = [row["step_s"] / row["unskipped_s"] for row in result["rows"]]
    assert ratios[2] < ratios[1] < 0.8 and ratios[2] < 0.4  # one step each; loosely
    assert result["max_grad_diff"] <= 1e-6


NOTHING_ELSE = """
import tempfile
from contextlib import closing
from pathlib import Path
from benchmarks.flat_groups import Steps, StopRequest, configuration, random_groups, write_inputs

with tempfile.TemporaryDirectory() as name, closing(StopRequest(60.0)) as stop:
    folder = Path(name)
    write_inputs(folder)
    weights = []
    for skip in (True, False):
        steps = Steps(configuration(folder, 4, {"learning_rate": 1e-3}), stop)
        start = steps.weights()
        steps.take(random_groups(4, 0.0), skip=False)
        before = steps.weights()
        steps.take(random_groups(4, 1.0), skip=skip)
        weights.append(steps.weights())
        assert not before.equal(start) and not weights[-1].equal(before)  # Adam's momentum
    print(weights[0].equal(weights[1]))
"""


def test_a_batch_of_nothing_else_steps_as_it_would_have() -> None:
    """With a gradient of zero, to the bit."""
    assert last_line("-c", NOTHING_ELSE) == "True"
