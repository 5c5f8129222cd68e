"""A run that is interrupted and resumed goes on where it was: prompts, steps, schedule, weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.random_model import write_prompts, write_random_model
from easyrl.event_log import read_events
from easyrl.inference_client.launch import EmbeddedServerProcess
from easyrl.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
BATCH, STEPS = 4, 4


def train(run_dir: Path, model: Path, prompts: Path, url: str, *options: str) -> str:
    command = [
        *(sys.executable, "-m", "easyrl.train", "benchmarks/overlap.yaml"),
        *(f"run.output_dir={run_dir}", "run.name=resume", f"model.path={model}"),
        *(f"data.files=[{prompts}]", "data.max_prompt_tokens=16", "data.shuffle=true"),
        *(f"inference.endpoints=[{url}]", f"trainer.batch_size={BATCH}"),
        *("rollout.num_generations=4", "rollout.max_tokens=12", "trainer.learning_rate=1e-3"),
        *(
            "trainer.lr_schedule=linear",
            "checkpoint.every_steps=2",
            "checkpoint.export_at_end=true",
        ),
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def trained_prompts(run_dir: Path) -> list[list[int]]:
    """Sorted prompt indices of each batch, as the log tells."""
    batches: list[list[int]] = []
    for event in read_events(run_dir / "events-rank0.jsonl"):
        if event["event"] == "batch_dispatched":
            batches.append([])
        elif event["event"] == "group_ready":
            batches[-1].append(event["index"])
    return [sorted(batch) for batch in batches]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * STEPS, 12)
    with EmbeddedServerProcess(model, ["--num-threads", "1", "--max-model-len", "160"]) as server:
        whole, parts = folder / "whole", folder / "parts"
        # max_steps is the schedule's length too, so the first life ends by an exception instead
        train(whole, model, prompts, server.url)
        train(parts, model, prompts, server.url)
        for later in (parts / "checkpoints").glob("step-4"):
            later.rename(folder / "step-4-of-the-first-life")
        train(parts, model, prompts, server.url, "--resume")
    return whole, parts


def test_the_second_life_takes_the_remaining_prompts(runs):
    _, parts = runs
    batches = trained_prompts(parts)
    assert batches[:STEPS] == trained_prompts(runs[0])
    assert batches[STEPS:] == batches[2:STEPS]  # resumed after step 2
    assert sorted(sum(batches[:2] + batches[STEPS:], [])) == list(range(BATCH * STEPS))


def test_metrics_have_each_step_once_and_the_schedule_goes_on(runs):
    whole, parts = (read_metrics(run / "metrics.jsonl") for run in runs)
    assert [m["step"] for m in parts] == [m["step"] for m in whole] == list(range(STEPS + 1))
    rates = [m["learning_rate"] for m in parts[1:]]
    assert rates == [m["learning_rate"] for m in whole[1:]]
    assert rates[0] > rates[-1] > 0
    # seeds belong to prompts, so the second life samples what the first one did
    assert parts[3]["reward/mean"] == pytest.approx(whole[3]["reward/mean"], abs=0.13)


def test_the_trained_weights_agree(runs):
    whole, parts = (load_file(run / "model" / "chunk-00000.safetensors") for run in runs)
    start = load_file(runs[0].parent / "model" / "model.safetensors")
    for name, value in whole.items():
        moved = (value - start[name]).norm()
        assert moved > 0
        # not to the bit: the order of arrival changes the order of summation
        assert (parts[name] - value).norm() < 0.05 * moved, name


def test_lives_do_not_share_versions(runs):
    _, parts = runs
    versions = [
        event["version"]
        for event in read_events(parts / "events-rank0.jsonl")
        if event["event"] == "batch_dispatched"
    ]
    assert versions[:STEPS] == [f"resume:0:{v}" for v in range(STEPS)]
    assert versions[STEPS:] == [f"resume:1:{v}" for v in range(2, STEPS)]
    assert json.loads((parts / "attempt.json").read_text()) == 1


def test_only_the_newest_checkpoints_stay(runs):
    whole, _ = runs
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step-2", "step-4"]
