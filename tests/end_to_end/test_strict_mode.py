"""Strict runs come to the same bits: sync with one endpoint, async with four that are unequal.

The four answer late, each response by another time, so that groups arrive in another order, and one
request fails and goes elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiohttp import web
from safetensors.torch import load_file

from easyrl.metrics.event_log import read_events
from tests.end_to_end.proxy import GENERATE, Proxy, reply
from tests.end_to_end.trainer_run import start_trainer
from tests.golden.comparison import assert_as_kept
from tests.golden.whole_run import (
    BATCH,
    KEPT,
    NUM_BATCHES,
    WEIGHTS_TOLERANCE,
    Inputs,
    outcome,
    servers,
    strict_command,
    train,
)


class CarelessProxy(Proxy):
    """Seems to be an embedded server that decodes responses together."""

    async def answer(self, request: web.Request, body: bytes) -> web.Response | None:
        if request.path != "/v1/models":
            return None
        answer = await self.forward("GET", request.path)
        models = json.loads(answer.body)
        models["data"][0]["batch_invariant"] = False
        return reply(models)


class UnevenProxy(Proxy):
    """Holds each generate request back for up to 0.1 s; the ``failing``-th is refused once."""

    def __init__(self, upstream: str, seed: int, failing: int = -1) -> None:
        self._rng = random.Random(seed)
        self._failing = failing
        self.num_generated = 0
        super().__init__(upstream)

    async def answer(self, request: web.Request, body: bytes) -> web.Response | None:
        if request.path != GENERATE:
            return None
        self.num_generated += 1
        if self.num_generated == self._failing:
            return reply({"error": {"message": "overloaded"}}, 503)
        await asyncio.sleep(0.1 * self._rng.random())
        return None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("strict")
    inputs = Inputs(folder)
    names = {"one": folder / "one" / "run", "four": folder / "four" / "run"}
    with ExitStack() as opened:
        urls = [server.url for server in opened.enter_context(servers(inputs.model, 4))]
        train(names["one"], inputs, urls[:1], "run.mode=sync")
        proxies = [UnevenProxy(url, seed, 9 if seed == 2 else -1) for seed, url in enumerate(urls)]
        for proxy in proxies:
            opened.callback(proxy.close)
        train(names["four"], inputs, [proxy.url for proxy in proxies], "run.mode=async")
        assert all(proxy.num_generated > 2 for proxy in proxies)
        assert proxies[2].num_generated >= 9  # one was refused
        refused = folder / "refused"
        proxy = CarelessProxy(urls[0])
        opened.callback(proxy.close)
        command = strict_command(refused / "run", inputs, [proxy.url])
        refused.mkdir()
        process = start_trainer(command, refused / "log")
        try:
            (refused / "status").write_text(str(process.wait(60)))
        finally:
            process.kill()
        yield names | {"refused": refused}


def arrivals(run_dir: Path) -> list[tuple[int, int]]:
    events = read_events(run_dir / "events-rank0.jsonl")
    return [(e["epoch"], e["index"]) for e in events if e["event"] == "group_ready"]


def test_metrics_and_weights_are_the_same_to_the_bit(runs: dict[str, Path]) -> None:
    one, four = outcome(runs["one"]), outcome(runs["four"])
    assert len(one["steps"]) == NUM_BATCHES + 1
    for ours, theirs in zip(one["steps"], four["steps"], strict=True):
        assert ours == theirs
    assert one["weights"] == four["weights"]
    # what is compared is not constant
    last = one["steps"][-1]
    assert last["grad_norm"] > 0 and 0 < last["reward/mean"] < 1 and last["batch/micro_batches"] > 1
    assert last["policy/kl"] > 0


def test_groups_arrived_in_another_order(runs: dict[str, Path]) -> None:
    one, four = arrivals(runs["one"]), arrivals(runs["four"])
    assert sorted(one) == sorted(four) and len(one) == BATCH * NUM_BATCHES
    assert one != four


def test_the_weights_were_trained(runs: dict[str, Path]) -> None:
    (trained,) = (runs["one"] / "model").glob("*.safetensors")
    before = load_file(runs["one"].parents[1] / "model" / "model.safetensors")
    after = load_file(trained)
    assert all(not after[name].equal(before[name]) for name in after)


def test_an_endpoint_that_decodes_responses_together_is_refused(runs: dict[str, Path]) -> None:
    log = (runs["refused"] / "log").read_text()
    assert (runs["refused"] / "status").read_text() == "2", log[-3000:]
    assert "Traceback" not in log
    assert "decodes responses together" in log and "--batch-invariant" in log
    assert "run.determinism=none" in log


def test_the_run_is_the_one_that_was_kept(runs: dict[str, Path]) -> None:
    kept = json.loads(KEPT.read_text())
    assert_as_kept(outcome(runs["one"]), kept, weights_tolerance=WEIGHTS_TOLERANCE)
