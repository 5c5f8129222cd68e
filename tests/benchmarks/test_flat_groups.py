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


def test_the_last_line() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.flat_groups", "--prompts", "10", "--repeats", "1"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    result = json.loads(output.splitlines()[-1])
    assert [row["flat"] for row in result["rows"]] == list(SHARES)
    ratios = [row["step_s"] / row["unskipped_s"] for row in result["rows"]]
    assert ratios[2] < ratios[1] < 0.8 and ratios[2] < 0.4  # one step each; loosely
    assert result["max_grad_diff"] <= 1e-6
