"""Training overlaps generation in async mode and follows it in sync mode: the run's own event log.

A slow endpoint holds back the responses of one prompt. In async mode they are released only after
the log shows that training has begun, so a trainer that waited for the whole batch would never
finish; in sync mode they are released once the trainer waits and all other responses are scored.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.random_model import write_prompts, write_random_model
from easyrl.event_log import read_events
from easyrl.inference_client.launch import EmbeddedServerProcess
from easyrl.metrics import read_metrics
from tests.end_to_end.proxy import GatedProxy

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS, NUM_GENERATIONS, PROMPT_TOKENS = 4, 2, 12


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlap")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(folder / "prompts.jsonl", NUM_PROMPTS, PROMPT_TOKENS)
    with EmbeddedServerProcess(model, ["--num-threads", "1", "--max-model-len", "160"]) as server:
        yield model, prompts, server.url


def wait_for(condition, process, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def events(run_dir: Path) -> list[str]:
    path = run_dir / "events-rank0.jsonl"
    return [event["event"] for event in read_events(path)] if path.exists() else []


def run_gated(mode: str, run_dir: Path, served_model) -> None:
    """One batch; the last prompt's responses are held back until the moment ``mode`` allows."""
    model, prompts, upstream = served_model
    seen: list[list[int]] = []  # prompts in the order in which they were dispatched

    def held(token_ids: list[int]) -> bool:
        if len(token_ids) != PROMPT_TOKENS:  # a canary
            return False
        if token_ids not in seen:
            seen.append(token_ids)
        return len(seen) == NUM_PROMPTS and token_ids == seen[-1]

    proxy = GatedProxy(upstream, held)
    command = [
        *(sys.executable, "-m", "easyrl.train", "benchmarks/overlap.yaml"),
        *(f"run.mode={mode}", f"run.output_dir={run_dir}", f"run.name=order-{mode}"),
        *(f"model.path={model}", f"data.files=[{prompts}]", "data.max_prompt_tokens=16"),
        *(f"inference.endpoints=[{proxy.url}]", f"trainer.batch_size={NUM_PROMPTS}"),
        *(f"rollout.num_generations={NUM_GENERATIONS}", "rollout.max_tokens=24"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    others = (NUM_PROMPTS - 1) * NUM_GENERATIONS
    try:
        wait_for(lambda: proxy.num_waiting == NUM_GENERATIONS, process)
        if mode == "async":
            wait_for(lambda: "micro_batch_end" in events(run_dir), process)
        else:
            wait_for(lambda: "waiting_for_batch" in events(run_dir), process)
            wait_for(lambda: events(run_dir).count("response_scored") == others, process)
        proxy.open_gate()
        assert process.wait(60) == 0, process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        proxy.close()


@pytest.fixture(scope="module")
def runs(served_model, tmp_path_factory) -> dict[str, Path]:
    folders = {mode: tmp_path_factory.mktemp(mode) for mode in ("async", "sync")}
    for mode, folder in folders.items():
        run_gated(mode, folder, served_model)
    return folders


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_first_backward_and_last_response(mode, runs):
    order = events(runs[mode])
    first_backward = order.index("micro_batch_start")
    last_response = len(order) - 1 - order[::-1].index("response_scored")
    assert order.count("response_scored") == NUM_PROMPTS * NUM_GENERATIONS
    assert (first_backward < last_response) == (mode == "async")
    assert ("waiting_for_batch" in order) == (mode == "sync")


def test_both_modes_take_the_same_step(runs):
    asynchronous, synchronous = (read_metrics(runs[m] / "metrics.jsonl")[1] for m in runs)
    assert asynchronous["grad_norm"] > 0
    for name in ("grad_norm", "loss", "reward/mean", "policy/entropy", "tokens/response"):
        # to the rounding of fp32 sums, whose order differs
        assert asynchronous[name] == pytest.approx(synchronous[name], rel=1e-5, abs=1e-7), name
