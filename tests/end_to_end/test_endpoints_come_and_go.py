"""One batch that loses its only endpoint, gets another, and sees the first one return."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.parts.ledger import dataset_order, read_ledger
from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.inference_client.pool.endpoint_list import read_wanted
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.proxy import GatedProxy
from tests.end_to_end.trainer_run import ROOT, start_trainer, trainer_command

pytestmark = pytest.mark.runs

NUM_PROMPTS, BATCH, NUM_GENERATIONS, PROMPT_TOKENS = 18, 6, 4, 12
MAX_INFLIGHT = 4
OPTIONS = ["--num-threads", "1", "--max-model-len", "160"]


def events(run_dir: Path) -> list[dict]:
    path = run_dir / "events-rank0.jsonl"
    return read_events(path) if path.exists() else []


def responses(run_dir: Path, url: str) -> int:
    """How many of ``url``'s responses were scored so far."""
    return sum(e["event"] == "response_scored" and e["endpoint"] == url for e in events(run_dir))


def endpoints_command(*arguments: str) -> str:
    command = [sys.executable, "-m", "easyrl", "endpoints", *arguments]
    wide = {**os.environ, "COLUMNS": "200"}  # nothing is folded
    result = subprocess.run(command, cwd=ROOT, env=wide, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The finished run: its folder, both URLs, and how many responses each had given when."""
    folder = tmp_path_factory.mktemp("come_and_go")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(folder / "prompts.jsonl", NUM_PROMPTS, PROMPT_TOKENS)
    run_dir, log = folder / "run", folder / "log"
    options = [
        *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}"),
        *(f"inference.max_inflight={MAX_INFLIGHT}", "inference.health_interval_s=0.5"),
        *("rollout.max_tokens=24", "trainer.learning_rate=1e-3"),
    ]
    first = EmbeddedServerProcess(model, OPTIONS)
    second = EmbeddedServerProcess(model, OPTIONS)
    # what the second one generates is held back, so that the batch cannot end without the first
    proxy = GatedProxy(second.url, held=lambda token_ids: len(token_ids) == PROMPT_TOKENS)
    process = start_trainer(trainer_command(run_dir, model, prompts, [first.url], *options), log)

    def until(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"{what}: {log.read_text()[-3000:]}"
            time.sleep(0.02)

    try:
        until(lambda: responses(run_dir, first.url) >= 3, "the first endpoint serves")
        first.kill()
        at_kill = responses(run_dir, first.url)
        endpoints_command("add", str(run_dir), proxy.url)
        until(lambda: proxy.num_waiting == MAX_INFLIGHT, "the added endpoint is used")
        assert not any(e["event"] == "step" for e in events(run_dir))
        first.restart()
        until(lambda: responses(run_dir, first.url) > at_kill + 1, "the first one is used again")
        assert not any(e["event"] == "step" for e in events(run_dir))
        listed = endpoints_command("list", str(run_dir))
        proxy.open_gate()
        assert process.wait(120) == 0, log.read_text()[-3000:]
        yield run_dir, first.url, proxy.url, at_kill, listed
    finally:
        process.kill()
        process.wait()
        proxy.close()
        first.close()
        second.close()


def test_the_kill_was_in_mid_batch(run):
    _, _, _, at_kill, _ = run
    assert 3 <= at_kill < BATCH * NUM_GENERATIONS


def test_every_prompt_is_trained_once_by_its_own_version(run):
    run_dir, *_ = run
    ledger = read_ledger(run_dir, dataset_order(NUM_PROMPTS, epochs=1))
    assert ledger.is_clean, ledger.problems
    assert (ledger.batches, ledger.groups_trained) == (NUM_PROMPTS // BATCH, NUM_PROMPTS)


def test_both_endpoints_served_the_batch_of_the_kill(run):
    run_dir, first, added, at_kill, _ = run
    names = [e["event"] for e in events(run_dir)]
    batch = events(run_dir)[: names.index("step")]
    served = [e["endpoint"] for e in batch if e["event"] == "response_scored"]
    assert len(served) == BATCH * NUM_GENERATIONS
    assert served.count(added) >= MAX_INFLIGHT
    assert served.count(first) == len(served) - served.count(added) > at_kill


def test_the_added_endpoint_is_used_on(run):
    run_dir, first, added, _, _ = run
    assert responses(run_dir, added) > MAX_INFLIGHT
    assert all(m["sync/endpoints"] == 2 for m in read_metrics(run_dir / "metrics.jsonl")[1:])


def test_the_trainer_agrees_with_both_to_the_rounding(run):
    run_dir, *_ = run
    metrics = read_metrics(run_dir / "metrics.jsonl")[1:]
    assert len(metrics) == NUM_PROMPTS // BATCH
    assert all(m["policy/logprob_diff_max"] < 1e-4 and m["grad_norm"] > 0 for m in metrics)


def test_the_list_shows_both(run):
    run_dir, first, added, _, listed = run
    assert first in listed and added in listed
    assert set(read_wanted(run_dir).added) == {first, added}
