"""A run in the default mode, killed some batches behind its start, comes to the same bits again.

Groups were trained as they arrived. The second life trains them in that order and in those rows, so
that the weights of every closed batch are the first life's to the bit, and no group is made twice.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

import orjson
import pytest

from benchmarks.random_model import write_prompts
from easyrl.journal.reading import read_takes
from easyrl.verify import verify
from tests.end_to_end.held_batch import MarkedRun
from tests.end_to_end.proxy import GENERATE, Proxy
from tests.end_to_end.trainer_run import run_trainer, trainer_command

BATCH, NUM_BATCHES, CLOSED = 6, 4, 3
OPTIONS = (
    *(f"trainer.batch_size={BATCH}", "rollout.num_generations=4", "rollout.max_tokens=8"),
    *("trainer.max_tokens_per_micro_batch=90", "trainer.learning_rate=1e-2"),  # two groups in a row
    *("checkpoint.every_steps=0", "journal.keep=all"),
)


class SlowProxy(Proxy):
    """Every response takes its own time."""

    def __init__(self, upstream: str) -> None:
        self._rng = random.Random(0)
        super().__init__(upstream)

    async def answer(self, request, body):
        if request.path == GENERATE:
            await asyncio.sleep(self._rng.random() * 0.2)


def batch_lines(run_dir: Path) -> list[dict]:
    path = run_dir / "certificate.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [record for line in whole if (record := orjson.loads(line))["kind"] == "batch"]


def kill_behind(run_dir: Path, command: list[str], log: Path, num_closed: int) -> None:
    run = MarkedRun(command, log)
    try:
        deadline = time.monotonic() + 120
        while len(batch_lines(run_dir)) < num_closed:
            assert run.process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.01)
    finally:
        run.kill()


@pytest.fixture(scope="module")
def run_dir(served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("order")
    run_dir = folder / f"order-{time.monotonic_ns()}"
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * NUM_BATCHES, 12)
    proxy = SlowProxy(served.url)
    try:
        command = trainer_command(run_dir, served.model, prompts, [proxy.url], *OPTIONS)
        kill_behind(run_dir, command, folder / "log", CLOSED)
        run_trainer([*command, "--resume"])
    finally:
        proxy.close()
    return run_dir


def taken(run_dir: Path, v: int, life: int) -> list[list[int]]:
    """Indices of the prompts that were trained together."""
    (takes,) = read_takes(run_dir / "journal", v, life)
    return [[index for _, index in take.keys] for take in takes]


def test_closed_batches_are_trained_again_to_the_same_bits(run_dir: Path) -> None:
    lines = batch_lines(run_dir)
    first, again = lines[:CLOSED], lines[CLOSED:]
    assert [line["batch"] for line in again] == list(range(NUM_BATCHES))
    for old, new in zip(first, again[:CLOSED], strict=True):
        assert new["weights"] == old["weights"], new["batch"]
        assert not new["discarded"] and all(group["recovered"] for group in new["groups"])
    assert not again[CLOSED]["discarded"]
    assert len({line["weights"] for line in again}) == NUM_BATCHES


def test_they_had_come_in_another_order_than_asked_for(run_dir: Path) -> None:
    for v in range(CLOSED):
        takes = taken(run_dir, v, life=0)
        assert sum(takes, []) != sorted(sum(takes, [])) and len(takes) > 1
        assert taken(run_dir, v, life=1) == takes


def test_the_run_is_on_policy(run_dir: Path) -> None:
    verdict = verify(run_dir)
    assert verdict.on_policy and verdict.ended, verdict
    assert (verdict.batches, verdict.superseded) == (NUM_BATCHES, CLOSED)
    assert verdict.trained == BATCH * NUM_BATCHES


@pytest.mark.slow
def test_a_step_is_replayed_to_the_bit(run_dir: Path) -> None:
    command = [sys.executable, "-m", "easyrl.replay", str(run_dir), "--step", str(CLOSED)]
    printed = run_trainer(command)
    assert f"step {CLOSED}: {CLOSED} batches trained from the start" in printed
    assert "equal to the bit:" in printed and "and the weights behind them" in printed
