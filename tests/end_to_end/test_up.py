"""``easyrl up``: servers and trainer of one file, and nothing of them left when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.process_guard import marked_processes

pytestmark = pytest.mark.runs

MARK = "EASYRL_TEST_OF_UP"  # all processes below the command inherit it
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a model, prompts, and what ``easyrl init`` writes for them."""
    write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 64, 8)
    asked = [json.loads(line) for line in prompts.read_text().splitlines()]
    prompts.write_text("".join(json.dumps({**each, "answer": "1"}) + "\n" for each in asked))
    own = ["--model", "model", "--data", "prompts.jsonl", "--reward", "exact"]
    done = run("init", *own, "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "easyrl", *arguments]


def environment(mark: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", mark: "1"}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(MARK),
        capture_output=True,
        text=True,
        timeout=240,
    )


# what a random model needs: prompts without a chat template, short responses
SMALL = ["data.apply_chat_template=false", "rollout.max_tokens=8", "trainer.batch_size=4"]


def test_what_init_has_written_trains_a_step(here: Path) -> None:
    done = run("up", "easyrl.yaml", *SMALL, "trainer.max_steps=1", cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("easyrl up: 1 embedded server, 1 training process")
    (step,) = [m for m in read_metrics(here / "runs/easyrl/metrics.jsonl") if "time/step_s" in m]
    assert step["step"] == 1
    assert (here / "runs/easyrl/model/config.json").is_file()
    assert marked_processes(MARK) == []


def test_a_file_without_servers_of_its_own_is_refused(here: Path) -> None:
    overrides = ["inference.launch=null", "inference.endpoints=[http://127.0.0.1:9]"]
    done = run("up", "easyrl.yaml", *overrides, cwd=here)
    assert done.returncode == 2 and "inference.launch" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture(params=[1, 2], ids=["one process", "two processes"])
def training(request, here: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A long run that has taken its first steps."""
    mark = f"{MARK}_{request.param}"
    endless = ["trainer.max_steps=100000", f"trainer.num_devices={request.param}"]
    endless += ["trainer.zero_stage=2"] if request.param > 1 else []
    log = here / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command("up", "easyrl.yaml", *SMALL, *endless),
            cwd=here,
            env=environment(mark),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + 120
        metrics = here / "runs/easyrl/metrics.jsonl"
        while not (metrics.exists() and len(read_metrics(metrics)) > 1):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        yield process, mark, log
    finally:
        process.kill()
        process.wait()


def servers_and_ranks(mark: str) -> tuple[int, int]:
    lines = [psutil.Process(pid).cmdline() for pid in marked_processes(mark)]
    servers = sum("easyrl.inference_client.servers.embedded.server" in line for line in lines)
    ranks = sum(any("--local_rank" in word for word in line) for line in lines)
    return servers, ranks


def is_clean(mark: str) -> bool:
    """Whether nothing is left, at once or as soon as watchers of the killed one have seen it."""
    deadline_s = time.monotonic() + 15
    while (left := marked_processes(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return not left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all(training, number: signal.Signals) -> None:
    process, mark, log = training
    servers, ranks = servers_and_ranks(mark)
    assert servers == 1 and ranks >= (2 if mark.endswith("2") else 0)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    status = process.wait(60)
    if number == signal.SIGKILL:
        assert is_clean(mark), log.read_text()
        return
    assert marked_processes(mark) == [], log.read_text()
    assert "Traceback" not in log.read_text()
    stopped = 128 + number
    saved = number == signal.SIGTERM and mark.endswith("1")  # as easyrl train ends then
    assert status == (0 if saved else stopped), log.read_text()
    if number == signal.SIGTERM:
        assert list((log.parent / "runs/easyrl/checkpoints").glob("step-*"))
