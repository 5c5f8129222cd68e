"""What an environment connects to is away: the run waits for it, and ends as in an outage."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import TEMPORARY_FAILURE
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = pytest.mark.runs

STEPS, BATCH, SAMPLES = 2, 3, 2
# one of two environments needs a server; which of them a prompt goes to is drawn
ROLLOUT = """
import asyncio
from easyrl.environments.client import Client

PORT = {port}
opened = 0


async def rollout(client: Client, prompt):
    global opened
    if PORT is not None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.close()
    opened += 1
    try:
        assert opened <= {most}, f"{{opened}} rollouts are open"
        await asyncio.sleep(0.05)
        made = await client.generate([5, 6, 7], max_tokens=6)
        return float(made.token_ids[0] % 7)
    finally:
        opened -= 1
"""


def options(folder: Path, port: int, max_outage_s: float, most: int = 100) -> list[str]:
    for name, own in (("with", port), ("without", None)):
        (folder / f"{name}.py").write_text(ROLLOUT.format(port=own, most=most))
    each = ", ".join(
        f"{{name: {name}_server, file: {folder / name}.py, max_rollouts: {most}}}"
        for name in ("with", "without")
    )
    return [
        "rewards=[]",
        f"environments=[{each}]",
        f"inference.max_outage_s={max_outage_s}",
        *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}"),
        *(f"rollout.num_generations={SAMPLES}", "rollout.max_tokens=8"),
    ]


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = [line for file in run_dir.glob("events*.jsonl") for line in file.open()]
    return [json.loads(line) for line in lines]


def test_it_waits_and_goes_on(served: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prompts = write_prompts(tmp_path / "prompts.jsonl", BATCH * STEPS, 6)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.close()
    began = threading.Event()

    def starts_later() -> None:
        while not began.wait(0.2):
            if any(e["event"] == "environment_unreachable" for e in events_of(run_dir)):
                began.set()
        again = socket.create_server(("127.0.0.1", port))
        again.settimeout(120)
        while not done.is_set():
            again.accept()[0].close()

    done = threading.Event()
    threading.Thread(target=starts_later, daemon=True).start()
    own = options(tmp_path, port, 300.0, most=2)
    run_trainer(trainer_command(run_dir, served.model, prompts, [served.url], *own))
    done.set()
    steps = [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] > 0]
    assert [m["step"] for m in steps] == [1, 2]
    assert sum(m["batch/groups_excluded"] for m in steps) == 0
    assert sum(m["reward/masked"] for m in steps) == 0
    told = [each["event"] for each in events_of(run_dir)]
    assert "environment_unreachable" in told and "environment_reached" in told


def test_it_ends_as_in_an_outage(served: Any, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", BATCH * STEPS, 6)
    own = options(tmp_path, 1, 3.0)
    command = trainer_command(tmp_path / "run", served.model, prompts, [served.url], *own)
    ended = subprocess.run(command, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    assert ended.returncode == TEMPORARY_FAILURE, said
    assert "environment with_server: " in said and "ConnectionRefusedError" in said
    assert "(inference.max_outage_s); start what it connects to again" in said
    assert "is excluded" not in said
