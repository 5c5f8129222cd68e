"""A run in the default mode, killed some batches behind its start, comes to the same bits again.

Groups were trained as they arrived, and with a reference the trainer looked ahead while it waited.
The second attempt trains them in that order and in those rows, and computes ahead what the first
did, so that the weights of every closed batch are the first attempt's to the bit, and no group is
made twice.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.ledger.journal.codec import DrainRecord
from easyrl.ledger.journal.reading import read_drains
from easyrl.ledger.verify import verify
from tests.end_to_end.held_batch import MarkedRun
from tests.end_to_end.proxy import GENERATE, Proxy
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = pytest.mark.runs

BATCH, NUM_BATCHES, CLOSED, G = 6, 3, 2, 4
LATE_S = 1.2
OPTIONS = (
    *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={G}", "rollout.max_tokens=8"),
    *("trainer.max_tokens_per_micro_batch=90", "trainer.learning_rate=1e-2"),  # two groups in a row
    *("checkpoint.every_steps=0", "journal.keep=all"),
)


class SlowProxy(Proxy):
    """Of each batch the first half comes long after the second, all but one response of a group
    well before that one.
    """

    def __init__(self, upstream: str) -> None:
        self._asked: Counter[tuple[int, ...]] = Counter()  # in the order of the prompts
        super().__init__(upstream)

    async def answer(self, request, body):
        if request.path != GENERATE:
            return
        prompt = tuple(orjson.loads(body)["token_ids"])
        self._asked[prompt] += 1
        if list(self._asked).index(prompt) % BATCH < BATCH // 2:
            await asyncio.sleep(LATE_S if self._asked[prompt] % G == 0 else LATE_S / 4)


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


@pytest.fixture(scope="module", params=["reference", pytest.param("alone", marks=pytest.mark.slow)])
def objective(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run_dir(served, objective: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("order")
    run_dir = folder / f"order-{time.monotonic_ns()}"
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * NUM_BATCHES, 12)
    proxy = SlowProxy(served.url)
    try:
        options = [*OPTIONS, *(["recipe.kl_coef=0.5"] if objective == "reference" else [])]
        command = trainer_command(run_dir, served.model, prompts, [proxy.url], *options)
        kill_behind(run_dir, command, folder / "log", CLOSED)
        run_trainer([*command, "--resume"])
    finally:
        proxy.close()
    return run_dir


def taken(run_dir: Path, v: int, attempt: int) -> list[DrainRecord]:
    """What was trained together."""
    (takes,) = read_drains(run_dir / "journal", v, attempt)
    return takes


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
    lines, others = batch_lines(run_dir), 0
    for v in range(CLOSED):
        takes = taken(run_dir, v, attempt=0)
        order = [tuple(key) for take in takes for key in take.keys]
        dispatched = [(group["epoch"], group["index"]) for group in lines[v]["groups"]]
        assert sorted(order) == sorted(dispatched)
        assert taken(run_dir, v, attempt=1) == takes
        others += order != dispatched and len(takes) > 1
    assert others > 0


def test_what_was_computed_ahead_was_so_again(run_dir: Path, objective: str) -> None:
    first, again = (
        [[take.ahead for take in taken(run_dir, v, attempt)] for v in range(CLOSED)]
        for attempt in (0, 1)
    )
    assert first == again
    assert any(piece for batch in first for piece in batch) == (objective == "reference")


def test_the_run_is_on_policy(run_dir: Path) -> None:
    verdict = verify(run_dir)
    assert verdict.on_policy and verdict.ended, verdict
    assert (verdict.batches, verdict.superseded) == (NUM_BATCHES, CLOSED)
    assert verdict.trained == BATCH * NUM_BATCHES


@pytest.mark.slow
def test_a_step_is_replayed_to_the_bit(run_dir: Path) -> None:
    command = [sys.executable, "-m", "easyrl.commands.replay", str(run_dir), "--step", str(CLOSED)]
    printed = run_trainer(command)
    assert f"step {CLOSED}: {CLOSED} batches trained from the start" in printed
    assert "equal to the bit:" in printed and "and the weights behind them" in printed
