"""What a run leaves of where its time went: a trace, accounts that add up, advice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.trackers import read_metrics
from easyrl.timeline.accounts_file import read_accounts
from easyrl.timeline.reading import kept_batches, read_spans
from easyrl.timeline.spans import Span
from tests.easyrl.timeline.trace_format import format_problems
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = pytest.mark.runs

STEPS, BATCH, SAMPLES = 4, 4, 4
# Long enough that a thread which another process holds up for a moment is within the tolerance.
SLOW = """
import time


def slow(prompt, texts, token_ids):
    time.sleep(0.1)
    return [float(len(ids)) for ids in token_ids]
"""


def assert_models_run_inside_phases(spans: Sequence[Span]) -> None:
    """Policy and reference run for each micro-batch, inside the phases that are theirs; beside
    that the policy's log-probabilities of the canary are taken."""
    phases = [span for span in spans if span.lane == "rank 0"]
    count = Counter[tuple[str, str]]()
    for span in spans:
        if span.lane == "models 0":
            (own,) = (p for p in phases if p.start_s <= span.start_s and span.end_s <= p.end_s)
            count[own.name, span.name] += 1
    num_micro_batches = sum("num_rows" in phase.args for phase in phases)
    assert count.pop(("train", "policy forward")) == num_micro_batches > 0
    assert count.pop(("train", "policy backward")) == num_micro_batches
    of_reference = [count.pop((p, "reference forward"), 0) for p in ("train", "look_ahead")]
    assert sum(of_reference) > 0
    assert {name for _, name in count} <= {"policy forward"}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_leaves_a_trace_and_accounts_that_add_up(
    served: Any, tmp_path: Path, mode: str
) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "slow.py").write_text(SLOW)
    prompts = write_prompts(tmp_path / "prompts.jsonl", BATCH * STEPS, 12)
    options = [
        *(f"run.mode={mode}", f"trainer.batch_size={BATCH}", "timeline.keep=3"),
        *(f"rollout.num_generations={SAMPLES}", "rollout.max_tokens=40", "recipe.kl_coef=0.01"),
        f"rewards=[{{file: {tmp_path / 'slow.py'}, function: slow}}]",
    ]
    command = trainer_command(run_dir, served.model, prompts, [served.url], *options)
    said = run_trainer(command)

    assert kept_batches(run_dir) == [1, 2, 3]  # the newest of 0 to 3
    for batch in kept_batches(run_dir):
        names = [span.name for span in read_spans(run_dir, batch)]
        assert names.count("request") == names.count("reward") == BATCH * SAMPLES
        assert names.count("group") == names.count("queued") == BATCH
        assert {"train", "step", "push", "proof"} <= set(names)
        assert_models_run_inside_phases(read_spans(run_dir, batch))
    trace = json.loads((run_dir / "trace.json").read_text())
    assert format_problems(trace) == []
    lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert lanes == {"rank 0", "models 0", "producer 0", f"endpoint {served.url}"}

    accounts = read_accounts(run_dir)
    assert [each.batch for each in accounts] == [0, 1, 2, 3]
    for each in accounts:
        for lane in each.lanes:
            assert sum(lane.causes.values()) == pytest.approx(lane.wall_s, abs=1e-3)
    lanes_of_rank = [lane for each in accounts for lane in each.lanes if lane.lane == "rank 0"]
    unexplained_s = sum(lane.unexplained_s for lane in lanes_of_rank)
    assert unexplained_s <= 0.02 * sum(lane.wall_s for lane in lanes_of_rank)
    # where training waits for all groups, it never starves afterwards
    starved = [lane.causes.get("starved", 0.0) for lane in lanes_of_rank]
    assert max(starved) < 0.005 or mode == "async"

    metrics = read_metrics(run_dir / "metrics.jsonl")
    last = metrics[-1]
    assert last["time/accounted_batch"] == 2  # the last one has no next one yet
    # equation 12's inference batches are as many prompts at once as were
    assert last["time/startup_sync_s"] >= last["time/startup_async_s"] > 0
    assert 0 < sum(step["time/timeline_s"] for step in metrics) < 0.5

    # as two cores may have it: batches of a run beside other work can be unlike each other
    assert "(the simulation is " in said or "no advice is given" in said
    shown = subprocess.run(
        [sys.executable, "-m", "easyrl", "trace", str(run_dir), "--batches", "2:"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "equation 13 of the paper" in " ".join(shown.split()) and "batches 2 to 3" in shown
