"""Two data-parallel ranks through the ``deepspeed`` launcher, each with its own producer."""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_trainer, trainer_command

NUM_PROMPTS, BATCH = 7, 3  # the last batch has one prompt: a rank has nothing to do


def test_every_prompt_is_trained_once(served, tmp_path):
    """ZeRO-3: the one stage in which no rank holds the model; the engine's tests have them all."""
    run_dir = tmp_path / "ranks"
    prompts = write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS, 12)
    options = [
        *(f"trainer.batch_size={BATCH}", "trainer.zero_stage=3", "trainer.learning_rate=1e-3"),
        *("rollout.num_generations=4", "rollout.max_tokens=12", "recipe.kl_coef=0.01"),
        "checkpoint.export_at_end=true",
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

    trained = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    start = AutoModelForCausalLM.from_pretrained(served.model)
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)
