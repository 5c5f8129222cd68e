"""All endpoints gone for too long: a checkpoint, status 75; ``--resume`` trains what was open."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.parts.ledger import dataset_order, read_ledger
from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.machine import free_port
from easyrl.schema import TEMPORARY_FAILURE
from tests.end_to_end.trainer_run import (
    event_names,
    run_trainer,
    start_ranks,
    start_trainer,
    trainer_command,
)

pytestmark = pytest.mark.runs

NUM_PROMPTS, BATCH, NUM_GENERATIONS, PROMPT_TOKENS = 16, 8, 4, 12
SERVER = ["--num-threads=1", "--max-model-len=160"]


def test_an_outage_ends_in_a_checkpoint_that_the_open_batch_goes_on_from(tmp_path):
    """Two ranks that have to agree before each micro-batch (ZeRO-2)."""
    model = write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS, PROMPT_TOKENS)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    server = EmbeddedServerProcess(model, SERVER, port=free_port())
    options = [
        *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}"),
        *("rollout.max_tokens=48", "trainer.zero_stage=2", "checkpoint.every_steps=0"),
        *("inference.max_inflight=4", "inference.health_interval_s=0.5"),
        *("inference.max_outage_s=3", "inference.max_retries=100"),
    ]
    arguments = (run_dir, model, prompts, [server.url], *options)
    try:
        ranks = start_ranks(trainer_command(*arguments), log, num_ranks=2)
        try:
            _until(lambda: _responses(run_dir, behind_steps=1) >= 2, ranks[0], log)
            server.kill()  # in the middle of the second batch
            statuses = [process.wait(90) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert statuses == [TEMPORARY_FAILURE] * 2
        assert "step 1 is saved" in log.read_text() and "--resume" in log.read_text()
        assert event_names(run_dir).count("step") == 1
        server.restart()
        run_trainer([*trainer_command(*arguments, num_ranks=2), "--resume"])
    finally:
        server.close()
    ledger = read_ledger(run_dir, dataset_order(NUM_PROMPTS, epochs=1))
    assert ledger.is_clean, ledger.problems
    assert (ledger.batches, ledger.groups_trained) == (2, NUM_PROMPTS)
    assert [m["step"] for m in read_metrics(run_dir / "metrics.jsonl")] == [0, 1, 2]


def test_a_run_starts_its_own_servers_and_brings_back_one_that_dies(tmp_path):
    model = write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS, PROMPT_TOKENS)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    server_options = ",".join(SERVER)
    options = [
        *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}"),
        *("rollout.max_tokens=48", "inference.max_inflight=4", "inference.health_interval_s=0.5"),
        f"inference.launch={{engine: embedded, count: 1, options: [{server_options}]}}",
    ]
    process = start_trainer(trainer_command(run_dir, model, prompts, [], *options), log)
    try:
        _until(lambda: _responses(run_dir, behind_steps=1) >= 2, process, log)
        _kill_server(model)  # the only one
        assert process.wait(120) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    ledger = read_ledger(run_dir, dataset_order(NUM_PROMPTS, epochs=1))
    assert ledger.is_clean, ledger.problems
    assert ledger.groups_trained == NUM_PROMPTS
    assert not _servers(model)


def _responses(run_dir: Path, *, behind_steps: int) -> int:
    """Responses that rank 0 has scored since that many steps were taken."""
    path = run_dir / "events-rank0.jsonl"
    if not path.exists():
        return 0
    names = [event["event"] for event in read_events(path)]
    if names.count("step") < behind_steps:
        return 0
    last = len(names) - names[::-1].index("step")
    return names[last:].count("response_scored")


def _until(condition, process, log: Path) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)


def _servers(model: Path) -> list[int]:
    """Processes of embedded servers of ``model``."""

    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(model) in words and any(word.endswith("embedded.server") for word in words):
            found.append(process.pid)
    return found


def _kill_server(model: Path) -> None:

    (pid,) = _servers(model)
    os.kill(pid, signal.SIGKILL)
