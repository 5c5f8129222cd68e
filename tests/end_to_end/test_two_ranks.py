"""Two data-parallel ranks through the ``deepspeed`` launcher, each with its own producer."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.samples.folder import SampleFolder
from easyrl.timeline.accounts_file import read_accounts
from tests.end_to_end.trainer_run import run_trainer, trainer_command

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS, BATCH = 7, 3  # the last batch has one prompt: a rank has nothing to do


@pytest.mark.runs
def test_every_prompt_is_trained_once(served, tmp_path):
    """ZeRO-3: the one stage in which no rank holds the model; the engine's tests have them all."""
    run_dir = tmp_path / "ranks"
    prompts = write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS, 12)
    options = [
        *(f"trainer.batch_size={BATCH}", "trainer.zero_stage=3", "trainer.learning_rate=1e-3"),
        *("rollout.num_generations=4", "rollout.max_tokens=12", "recipe.kl_coef=0.01"),
        *("checkpoint.export_at_end=true", "samples.per_step=2"),
    ]
    command = trainer_command(run_dir, served.model, prompts, [served.url], *options, num_ranks=2)
    run_trainer(command)

    groups = [
        [e["index"] for e in read_events(run_dir / f"events-rank{rank}.jsonl")
         if e["event"] == "group_ready"]
        for rank in range(2)
    ]  # fmt: skip
    assert sorted(groups[0] + groups[1]) == list(range(NUM_PROMPTS))
    assert groups[0] and groups[1]

    metrics = read_metrics(run_dir / "metrics.jsonl")[1:]
    assert [m["batch/groups"] for m in metrics] == [3, 3, 1]
    assert all(m["step_skipped"] == 0 and m["grad_norm"] > 0 for m in metrics)
    # the trainer's log-probabilities are the server's, at every version
    assert all(m["policy/logprob_diff_max"] < 1e-4 for m in metrics)

    # two of each step's groups are kept, the choice is of both ranks' together
    folder = SampleFolder(run_dir)
    assert folder.steps() == [1, 2, 3] and all(map(folder.is_whole, folder.steps()))
    kept = {step: folder.read(step) for step in folder.steps()}
    assert [len(each) for each in kept.values()] == [2, 2, 1]
    assert len({(g.epoch, g.index) for each in kept.values() for g in each}) == 5
    assert {group.why for group in kept[1]} <= {"worst", "best", "drawn"}
    # with a KL every group goes through the model, and so is compared
    differences = [r.logprob_diff for each in kept.values() for g in each for r in g.responses]
    assert len(differences) == 5 * 4 and all(d is not None and abs(d) < 1e-4 for d in differences)
    assert all(m["time/samples_s"] > 0 for m in metrics)
    command = [sys.executable, "-m", "easyrl", "samples", str(run_dir), "--step", "2"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    heads = [line for line in shown.splitlines() if line.startswith(("====", "----"))]
    assert len(heads) == 2 * (1 + 4) and heads[0].startswith("==== step 2 | prompt ")

    accounts = read_accounts(run_dir)  # of both ranks' spans
    assert [each.batch for each in accounts] == [0, 1, 2]
    lanes = [lane.lane for each in accounts for lane in each.lanes]
    assert lanes == ["rank 0", "rank 1", f"endpoint {served.url}"] * 3

    trained = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    start = AutoModelForCausalLM.from_pretrained(served.model)
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)
