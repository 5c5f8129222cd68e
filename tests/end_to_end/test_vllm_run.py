"""A run against a real vLLM server, with everything on that proves what it serves."""

from pathlib import Path

import pytest

from benchmarks.parts.ledger import dataset_order, read_ledger
from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.inference_client.servers.managed.launch import VllmServerProcess
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_trainer, trainer_command
from tests.vllm_environment import VLLM_PYTHON

STEPS, BATCH, NUM_GENERATIONS = 3, 4, 4

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=2)
    prompts = write_prompts(folder / "prompts.jsonl", STEPS * BATCH, 12)
    options = [
        *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}"),
        *("rollout.max_tokens=24", "trainer.learning_rate=1e-3"),
        *("weight_sync.prove=true", "weight_sync.probe=true", "weight_sync.canary=true"),
    ]
    with VllmServerProcess(model, Path(VLLM_PYTHON), ["--max-model-len", "256"]) as server:
        command = trainer_command(folder / "run", model, prompts, [server.url], *options)
        run_trainer(command)
    return folder / "run"


def test_every_prompt_is_trained_once_by_its_own_version(run_dir):
    ledger = read_ledger(run_dir, dataset_order(STEPS * BATCH, epochs=1))
    assert ledger.is_clean, ledger.problems
    assert ledger.batches == STEPS


def test_each_sync_was_proven_by_the_server(run_dir):
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(STEPS + 1))
    assert all(m["sync/endpoints"] == 1 for m in metrics)
    assert all(m["sync/canary_max"] < 1e-3 for m in metrics)


def test_the_weights_moved_and_the_server_s_log_probabilities_are_the_trainer_s(run_dir):
    for metrics in read_metrics(run_dir / "metrics.jsonl")[1:]:
        assert metrics["grad_norm"] > 0 and metrics["step_skipped"] == 0
        # fp32 on both sides; learning rate 1e-3 moves them by far more
        assert metrics["policy/logprob_diff_max"] < 1e-3
