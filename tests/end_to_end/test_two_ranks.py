"""Two data-parallel ranks through the ``deepspeed`` launcher, each with its own producer."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.random_model import write_prompts, write_random_model
from easyrl.event_log import read_events
from easyrl.inference_client.launch import EmbeddedServerProcess
from easyrl.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS, BATCH = 7, 3  # the last batch has one prompt: a rank has nothing to do


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(folder / "prompts.jsonl", NUM_PROMPTS, 12)
    with EmbeddedServerProcess(model, ["--num-threads", "1", "--max-model-len", "160"]) as server:
        yield model, prompts, server.url


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(("zero_stage", "export"), [(1, True), (3, False)])
def test_every_prompt_is_trained_once(zero_stage, export, served, tmp_path):
    model, prompts, url = served
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [
        *(sys.executable, str(launcher), "--num_accelerators", "2", "--master_port", free_port()),
        *("--module", "easyrl.train", "benchmarks/overlap.yaml"),
        *(f"run.output_dir={tmp_path}", f"run.name=ranks-{zero_stage}", f"model.path={model}"),
        *(f"data.files=[{prompts}]", "data.max_prompt_tokens=16", f"inference.endpoints=[{url}]"),
        *(f"trainer.batch_size={BATCH}", f"trainer.zero_stage={zero_stage}"),
        *("rollout.num_generations=4", "rollout.max_tokens=12", "objective.kl_coef=0.01"),
        *("trainer.learning_rate=1e-3", f"checkpoint.export_at_end={str(export).lower()}"),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]

    groups = [
        [e["index"] for e in read_events(tmp_path / f"events-rank{rank}.jsonl")
         if e["event"] == "group_ready"]
        for rank in range(2)
    ]  # fmt: skip
    assert sorted(groups[0] + groups[1]) == list(range(NUM_PROMPTS))
    assert groups[0] and groups[1]

    metrics = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert [m["batch/groups"] for m in metrics] == [3, 3, 1]
    assert all(m["step_skipped"] == 0 and m["grad_norm"] > 0 for m in metrics)
    # the trainer's log-probabilities are the server's, at every version
    assert all(m["policy/logprob_diff_max"] < 1e-4 for m in metrics)

    assert (tmp_path / "model").exists() == export
    if export:
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        start = AutoModelForCausalLM.from_pretrained(model)
        pairs = zip(trained.parameters(), start.parameters(), strict=True)
        assert all(not torch.equal(a, b) for a, b in pairs)
