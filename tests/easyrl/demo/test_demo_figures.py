"""The last line of a demo says which share of its lanes' time the accounts leave unexplained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from easyrl.demo.training import run_figures
from easyrl.timeline.accounts_file import AccountsFile
from easyrl.timeline.folder import TimelineFolder
from tests.easyrl.timeline.made_spans import A, batch, phases, requests

STEP = {
    "step": 1,
    "time/step_s": 2.0,
    "throughput/tokens_per_s_per_device": 30.0,
    "batch/groups_drawn": 4,
    "batch/groups": 3,
    "time/proof_s": 0.1,
}


def test_the_share_is_that_of_the_lane_which_has_most(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    assert run_figures(tmp_path, 4.0)["unexplained_share"] == 0  # nothing is kept
    accounts = AccountsFile(TimelineFolder(tmp_path), num_ranks=1, from_batch=0)
    for number, idle_s in enumerate((0.5, 0.1)):
        spans = [
            *phases(("begin", 1), ("train", 2), ("other", 0.1), ("sync", 1 - 0.1)),
            *requests(A, (0.0, 2.0 - idle_s), (2.0, 4.0)),  # and nobody else is asked meanwhile
        ]
        whole = batch(spans, 4.0, number)
        TimelineFolder(tmp_path).write(whole)
        accounts.add(whole)
    found = run_figures(tmp_path, 4.0)
    assert found["unexplained_share"] == pytest.approx((0.5 + 0.1) / 8)  # the rank's: 0.2 / 8
    assert found["proof_share"] == 0.025
