"""Models that are split over processes, whole runs: trained, pushed from all stages, resumed in
another layout, and each step repeated by DeepSpeed's engine on one process.
"""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.demo.layouts import named_layout
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import ROOT, run_to_end, run_trainer, trainer_command
from tests.end_to_end.trainer_run import trainer_environment as environment

pytestmark = pytest.mark.slow

BATCH, NUM_PROMPTS, PROMPT_TOKENS = 4, 16, 12
SERVER = ["--num-threads", "1", "--max-model-len", "160", "--batch-invariant"]
SETTINGS = [
    *("data.shuffle=true", "journal.keep=all", "run.event_log=true"),
    *(f"trainer.batch_size={BATCH}", "rollout.num_generations=4", "rollout.max_tokens=12"),
    *("trainer.learning_rate=1e-3", "trainer.max_tokens_per_micro_batch=64"),
    *("recipe.kl_coef=0.05", "trainer.updates_per_batch=2"),  # reference, and old policy
    "checkpoint.every_steps=2",
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    model = write_random_model(folder / "model", hidden_size=64, num_layers=4)
    prompts = write_prompts(folder / "prompts.jsonl", NUM_PROMPTS, PROMPT_TOKENS)
    with EmbeddedServerProcess(model, SERVER) as server:
        yield model, prompts, server.url


def command(served, run_dir, layout, *options):
    model, prompts, url = served
    split = named_layout(layout)
    settings = [*SETTINGS, *split.overrides, *options]
    return trainer_command(run_dir, model, prompts, [url], *settings, num_ranks=split.num_processes)


def easyrl(*arguments):
    """A command's status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "easyrl", *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_run_goes_on_in_other_layouts_and_one_process_repeats_each_step(served, tmp_path):
    run_dir = tmp_path / "run"
    strict = "run.determinism=strict"
    for number, layout in enumerate(("tp2pp2", "pp2", "tp2sp", "dp1")):
        further = ["--resume"] if number else []
        steps = f"trainer.max_steps={2 * (number + 1)}"
        run_trainer(command(served, run_dir, layout, strict, steps, *further))
    metrics = [m for m in read_metrics(run_dir / "metrics.jsonl") if "grad_norm" in m]
    assert [m["step"] for m in metrics] == [2, 4, 6, 8]
    assert all(m["grad_norm"] > 0 and m["policy/kl"] >= 0 for m in metrics)
    # the trainer's log-probabilities are the server's, at every version
    assert all(m["policy/logprob_diff_max"] < 1e-4 for m in metrics)
    status, said = easyrl("verify", run_dir)
    assert status == 0 and "on-policy: 4 batches, 16 groups trained" in said, said
    for step in (2, 4, 6, 8):
        _, said = easyrl("replay", run_dir, "--step", step)
        [line] = [each for each in said.splitlines() if each.startswith("grad_norm")]
        recorded, replayed = map(float, line.split()[1:3])
        assert replayed == pytest.approx(recorded, rel=1e-5), said


def test_two_copies_of_a_split_model_share_the_prompts(served, tmp_path):
    run_dir = tmp_path / "copies"
    run_trainer(command(served, run_dir, "tp2dp2", "checkpoint.export_at_end=true"))
    groups = [
        [e["index"] for e in read_events(run_dir / f"events-rank{rank}.jsonl")
         if e["event"] == "group_ready"]
        for rank in range(2)
    ]  # fmt: skip
    assert sorted(groups[0] + groups[1]) == list(range(NUM_PROMPTS))
    assert groups[0] and groups[1]
    assert not (run_dir / "events-rank2.jsonl").exists()  # two heads, of four processes
    lines = (run_dir / "certificate.jsonl").read_text().splitlines()
    batches = [each for each in map(json.loads, lines) if "groups" in json.dumps(each)]
    assert {g["rank"] if "rank" in g else 0 for b in batches for g in b.get("groups", [])} <= {0, 1}
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    start = AutoModelForCausalLM.from_pretrained(served[0])
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)


def test_a_number_of_processes_that_does_not_fit_is_refused_before_the_model(served, tmp_path):
    wrong = command(served, tmp_path / "wrong", "tp2pp2")
    wrong[wrong.index("--num_accelerators") + 1] = "3"
    done = run_to_end(wrong)
    assert done.returncode != 0
    assert "parallel.tensor: 4 processes share one copy" in done.stdout
    assert "start a multiple of 4" in done.stdout and "Traceback" not in done.stdout
