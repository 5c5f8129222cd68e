"""Finished groups go from rank to rank in a run of two, and its account names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.ledger.verify import verify
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_trainer, trainer_command


@pytest.mark.slow
def test_what_one_rank_drew_another_trains(served: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prompts = write_prompts(tmp_path / "prompts.jsonl", 36, 12)
    options = [
        *("trainer.batch_size=12", "trainer.zero_stage=1", "trainer.max_steps=3"),
        *("rollout.num_generations=2", "rollout.max_tokens=24"),
        "trainer.max_tokens_per_micro_batch=64",
    ]
    command = trainer_command(run_dir, served.model, prompts, [served.url], *options, num_ranks=2)
    run_trainer(command)

    sent = {
        (event["epoch"], event["index"]): (rank, event["rank"])
        for rank in range(2)
        for event in read_events(run_dir / f"events-rank{rank}.jsonl")
        if event["event"] == "group_handed_over"
    }
    assert sent and all(drew != trains for drew, trains in sent.values())
    run = RecordedRun(run_dir)
    groups = [group for v in range(3) for group in run.batch(v).groups]
    named = {g.key: (g.drawn_by, g.rank) for g in groups if g.drawn_by is not None}
    assert named == sent
    metrics = read_metrics(run_dir / "metrics.jsonl")[1:]
    assert sum(m["balance/groups_moved"] for m in metrics) == len(sent)
    assert sum(m["balance/bytes_moved"] for m in metrics) > 24 * len(sent)
    assert sorted(group.key for group in groups) == [(0, index) for index in range(36)]
    verdict = verify(run_dir)
    assert verdict.on_policy, str(verdict)
