"""Weight sync against real servers, some of them behind a proxy that lies."""

import asyncio
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from benchmarks.random_model import write_random_model
from easyrl.agreement import Agreement
from easyrl.canary import Canary, canary_prompts
from easyrl.config import InferenceConfig, ModelConfig, SamplingConfig, WeightSyncConfig
from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.dataloaders.packing import dummy_micro_batch, pack_groups
from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.launch import EmbeddedServerProcess
from easyrl.inference_client.pool import EndpointPool
from easyrl.policy_model import load_policy_model, run_micro_batch
from easyrl.schema import PolicyVersion, Prompt
from easyrl.weight_sync import NoEndpointServes, WeightSync
from tests.end_to_end.proxy import GENERATE, Proxy, reply

TOLERANCE = 1e-3
V0, V1 = PolicyVersion("sync", 0, 0), PolicyVersion("sync", 0, 1)


class PlainEngine:
    """The part of ``TrainEngine`` that weight sync uses, over one unsharded model."""

    rank = dp_rank = 0
    dp_size = 1
    lockstep = False

    def __init__(self, model_dir: Path, dtype: str = "fp32") -> None:
        self.policy = load_policy_model(ModelConfig(path=model_dir, dtype=dtype))

    def named_weights(self, kind="full"):
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def logprobs(self, micro_batch):
        return run_micro_batch(self.policy, micro_batch, 1.0)[0]

    @contextmanager
    def perturbed_weights(self):
        saved = [p.detach().clone() for p in self.policy.parameters()]
        with torch.no_grad():
            for number, parameter in enumerate(self.policy.parameters()):
                parameter.mul_(1.05 if number % 2 else 0.95)
        yield
        with torch.no_grad():
            for parameter, value in zip(self.policy.parameters(), saved, strict=True):
                parameter.copy_(value)

    def train(self, size: float) -> None:
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(size * torch.randn_like(parameter))


class UnperturbedEngine(PlainEngine):
    """Its probe changes nothing, so nothing is there to be seen."""

    @contextmanager
    def perturbed_weights(self):
        yield


class ClaimsWithoutUpdating(Proxy):
    """Acknowledges every update, stamps the version, and keeps its old weights."""

    def __init__(self, upstream: str, *, lies_about_checksums: bool) -> None:
        self.checksums: dict[str, str] = {}
        self.lies_about_checksums = lies_about_checksums
        super().__init__(upstream)

    async def answer(self, request, body):
        if request.path == "/start_weight_update":
            return reply({"message": "started"})
        if request.path == "/update_weights":
            self.checksums |= orjson.loads(body)["update_info"]["checksums"]
            return reply({"message": "updated"})
        if request.path == "/finish_weight_update":
            version = orjson.loads(body)["weight_version"]
            await self.forward("POST", "/update_weight_version", {"new_version": version})
            return reply({"message": "finished"})
        if request.path == "/weight_checker" and self.lies_about_checksums:
            return reply({"checksums": self.checksums})
        return None


class ForgetsItsVersion(Proxy):
    async def answer(self, request, body):
        if request.path == "/weight_info":
            return reply({"weight_version": "default"})
        return None


class FailsOnce(Proxy):
    """Answers 500 to the first update."""

    failed = False

    async def answer(self, request, body):
        if request.path == "/update_weights" and not self.failed:
            self.failed = True
            return reply({"error": "out of luck"}, status=500)
        return None


class Restarting(Proxy):
    """Its server can be exchanged; holds requests for rollouts back until ``released``."""

    def __init__(self, upstream: str) -> None:
        self.released = threading.Event()
        self.released.set()
        self.num_waiting = 0
        super().__init__(upstream)

    async def answer(self, request, body):
        if request.path == GENERATE and not self.released.is_set():
            self.num_waiting += 1
            await asyncio.to_thread(self.released.wait)
            return reply({"error": "the server is gone"}, status=502)
        return None

    def move_to(self, upstream: str) -> None:
        self._upstream = upstream


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("sync") / "model", hidden_size=64, num_layers=2
    )


@pytest.fixture(scope="module")
def server(model_dir):
    with EmbeddedServerProcess(model_dir, ["--num-threads", "1"]) as process:
        yield process.url


@pytest.fixture(scope="module")
def second_server(model_dir):
    with EmbeddedServerProcess(model_dir, ["--num-threads", "1"]) as process:
        yield process.url


@contextmanager
def weight_sync(
    engine,
    urls,
    tmp_path,
    *,
    tolerance=TOLERANCE,
    startup_timeout_s=60.0,
    mask_truncated=False,
    **options,
):
    with ExitStack() as opened:
        thread = opened.enter_context(LoopThread())

        async def offload(function, *args):
            return function(*args)

        pool = EndpointPool(InferenceConfig(endpoints=urls), offload)
        thread.run(pool.start())
        opened.callback(lambda: thread.run(pool.close()))
        thread.run(pool.wait_until_healthy())
        prompts = [Prompt(i, np.arange(6, 16, dtype=np.int32) % 10 + 8, "", None) for i in range(8)]

        def pack(groups, advantages):
            return pack_groups(
                groups,
                advantages,
                aggregation="token",
                max_tokens=16,
                mask_truncated=mask_truncated,
                max_tokens_per_micro_batch=512,
            )

        sync = WeightSync(
            config=WeightSyncConfig(directory=tmp_path, **options),
            tolerance=tolerance,
            run_name="sync",
            engine=engine,
            pool=pool,
            thread=thread,
            agreement=Agreement(0, 1),
            canary=Canary(canary_prompts(prompts, 256), 1.0, pack, 60.0),
            dummy=dummy_micro_batch,
            startup_timeout_s=startup_timeout_s,
        )
        opened.callback(sync.close)
        pool.set_repair(sync.repair)
        yield sync, pool


def statuses(pool) -> list[str]:
    return [e.excluded or f"confirmed {e.confirmed_version}" for e in pool.endpoints]


def test_an_honest_endpoint_is_confirmed_at_each_version(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    with weight_sync(engine, [server], tmp_path) as (sync, pool):
        metrics = sync.publish(V0)
        assert statuses(pool) == ["confirmed sync:0:0"]
        assert metrics["sync/canary_mean"] < 1e-5
        engine.train(1e-3)
        sync.publish(V1)
        assert statuses(pool) == ["confirmed sync:0:1"]
        artifacts = [path.name for path in (tmp_path / "easyrl-sync").iterdir()]
        assert artifacts == ["sync-0-1"]  # version v stays, served without the trainer
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make_proxy", "options", "message"),
    [
        (
            lambda url: ClaimsWithoutUpdating(url, lies_about_checksums=False),
            {"probe": False},
            "another checksum",
        ),
        (
            lambda url: ClaimsWithoutUpdating(url, lies_about_checksums=True),
            {"probe": False},
            "canary: log-probabilities differ",
        ),
        (
            lambda url: ClaimsWithoutUpdating(url, lies_about_checksums=True),
            {},
            "canary: log-probabilities differ",
        ),
        (
            lambda url: ClaimsWithoutUpdating(url, lies_about_checksums=True),
            {"canary": False},
            "canary: log-probabilities differ",
        ),
        (ForgetsItsVersion, {"probe": False}, "serves version 'default'"),
    ],
    ids=["stale", "stale-and-lying", "stale-and-lying-at-the-probe", "probe-alone", "version"],
)
def test_a_lying_endpoint_is_excluded_and_named(
    make_proxy, options, message, model_dir, server, tmp_path
):
    engine = PlainEngine(model_dir)
    engine.train(1e-2)  # unlike what the server was started with
    proxy = make_proxy(server)
    try:
        with weight_sync(engine, [proxy.url], tmp_path, **options) as (sync, pool):
            with pytest.raises(NoEndpointServes, match=message) as caught:
                sync.publish(V0)
            assert proxy.url in str(caught.value)
    finally:
        proxy.close()


def test_a_tiny_step_that_was_missed_is_caught_by_the_checksum(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    proxy = ClaimsWithoutUpdating(server, lies_about_checksums=False)
    try:
        with weight_sync(engine, [server], tmp_path) as (sync, _):
            sync.publish(V0)
        engine.train(1e-7)
        options = {"probe": False, "canary": True}
        with weight_sync(engine, [proxy.url], tmp_path, **options) as (sync, _):
            with pytest.raises(NoEndpointServes, match="another checksum"):
                sync.publish(V1)
    finally:
        proxy.close()


@pytest.mark.parametrize(
    ("make_proxy", "probe", "message"),
    [
        (ForgetsItsVersion, False, "serves version 'default'"),
        (
            lambda url: ClaimsWithoutUpdating(url, lies_about_checksums=True),
            True,
            "canary: log-probabilities differ",
        ),
    ],
    ids=["version", "stale-and-lying-at-the-probe"],
)
def test_the_others_go_on_without_a_liar(
    make_proxy, probe, message, model_dir, server, second_server, tmp_path
):
    engine = PlainEngine(model_dir)
    engine.train(1e-2)
    proxy = make_proxy(second_server)
    try:
        with weight_sync(engine, [server, proxy.url], tmp_path, probe=probe) as (sync, pool):
            metrics = sync.publish(V0)
            assert statuses(pool)[0] == "confirmed sync:0:0"
            assert message in statuses(pool)[1]
            assert metrics["sync/canary_mean"] < 1e-5  # of those that are left
    finally:
        proxy.close()


def test_a_change_that_cannot_be_seen_proves_nothing(model_dir, server, tmp_path):
    with weight_sync(UnperturbedEngine(model_dir), [server], tmp_path) as (sync, _):
        with pytest.raises(NoEndpointServes, match="not visible above 1.00e-03"):
            sync.publish(V0)


def test_a_canary_without_a_token_to_compare_does_not_pass(model_dir, server, tmp_path):
    """``mask_truncated`` drops the canary's responses, all of which end with "length"."""
    options = {"probe": False, "mask_truncated": True}
    with weight_sync(PlainEngine(model_dir), [server], tmp_path, **options) as (sync, _):
        with pytest.raises(NoEndpointServes, match="no token to compare"):
            sync.publish(V0)


def test_bf16_weights_pass_and_the_probe_sees_their_change(model_dir, tmp_path):
    engine = PlainEngine(model_dir, dtype="bf16")
    options = ["--num-threads", "1", "--dtype", "bfloat16"]
    with EmbeddedServerProcess(model_dir, options) as server:
        with weight_sync(engine, [server.url], tmp_path, tolerance=5e-2) as (sync, pool):
            metrics = sync.publish(V0)
            assert statuses(pool) == ["confirmed sync:0:0"]
            assert metrics["sync/canary_mean"] < 1e-2  # bf16 noise is 3e-3


def test_a_failed_push_is_repeated(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    proxy = FailsOnce(server)
    try:
        with weight_sync(engine, [proxy.url], tmp_path, probe=False) as (sync, pool):
            sync.publish(V0)
            assert proxy.failed
            assert statuses(pool) == ["confirmed sync:0:0"]
    finally:
        proxy.close()


def test_weights_are_those_of_before_the_probe(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    before = [p.detach().clone() for p in engine.policy.parameters()]
    with weight_sync(engine, [server], tmp_path) as (sync, _):
        sync.publish(V0)
    for parameter, value in zip(engine.policy.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


# ---- restarts ------------------------------------------------------------------------------------


def test_a_restart_in_mid_batch_is_repaired(model_dir, second_server, tmp_path):
    version = PolicyVersion("repair", 0, 0)
    engine = PlainEngine(model_dir)
    engine.train(1e-2)
    first = EmbeddedServerProcess(model_dir, ["--num-threads", "1"])
    proxy = Restarting(first.url)
    try:
        with weight_sync(engine, [proxy.url], tmp_path, probe=False) as (sync, pool):
            sync.publish(version)
            proxy.released.clear()
            prompt = np.arange(8, 16, dtype=np.int32)
            work = pool.generate(prompt, SamplingConfig(max_tokens=8), 3, str(version))
            pending = sync._thread.submit(work)
            wait_until(lambda: proxy.num_waiting == 1)
            first.stop()
            proxy.move_to(second_server)
            proxy.released.set()
            completion = pending.result(60)
            assert {span.version for span in completion.version_spans} == {str(version)}
            assert statuses(pool) == ["confirmed repair:0:0"]
            # The new server has not shown the probe's change; the next sync asks for the canary.
            assert sync.publish(PolicyVersion("repair", 0, 1))["sync/canary_mean"] < 1e-5
    finally:
        proxy.released.set()
        proxy.close()
        first.stop()


def test_an_endpoint_that_restarts_during_a_sync_is_waited_for_and_probed_again(
    model_dir, server, second_server, tmp_path
):
    probes = []

    class CountingEngine(PlainEngine):
        def perturbed_weights(self):
            probes.append(1)
            return super().perturbed_weights()

    proxy = Restarting(server)
    try:
        with weight_sync(CountingEngine(model_dir), [proxy.url], tmp_path) as (sync, pool):
            sync.publish(PolicyVersion("wait", 0, 0))
            sync.publish(PolicyVersion("wait", 0, 1))
            assert len(probes) == 1
            proxy.move_to("http://127.0.0.1:1")  # nobody listens there
            timer = threading.Timer(1.5, proxy.move_to, [second_server])
            timer.start()
            sync.publish(PolicyVersion("wait", 0, 2))
            timer.join()
            assert statuses(pool) == ["confirmed wait:0:2"]
            assert len(probes) == 2
    finally:
        proxy.close()


def test_rank_zero_repairs_for_ranks_that_still_generate(
    model_dir, server, second_server, tmp_path, monkeypatch
):
    """Nothing is asked of rank 0's pool; the other rank could only wait."""
    monkeypatch.setattr("easyrl.weight_sync.WATCH_INTERVAL_S", 0.1)
    proxy = Restarting(server)
    try:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, probe=False) as (sync, _):
            sync._agreement.num_ranks = 2  # the other one is silent
            version = PolicyVersion("watch", 0, 0)
            sync.publish(version)
            proxy.move_to(second_server)
            other = Restarting(second_server)  # the other rank's way to the same server
            try:
                with weight_sync(None, [other.url], tmp_path / "other") as (waiting, its_pool):
                    waiting._agreement.rank = 1
                    waiting._served_version = str(version)
                    waiting._thread.run(waiting.repair(its_pool.endpoints[0]))
                    assert statuses(its_pool) == ["confirmed watch:0:0"]
            finally:
                other.close()
    finally:
        proxy.close()


def test_another_rank_waits_only_so_long_for_a_repair(model_dir, server, tmp_path):
    options = {"startup_timeout_s": 0.1}
    with weight_sync(None, [server], tmp_path, **options) as (waiting, pool):
        waiting._agreement.rank = 1
        waiting._served_version = "never:0:0"
        with pytest.raises(EndpointUnavailable, match="not never:0:0"):
            waiting._thread.run(waiting.repair(pool.endpoints[0]))


def test_an_endpoint_that_stays_away_is_excluded(model_dir, server, tmp_path):
    proxy = Restarting(server)
    options = {"probe": False, "startup_timeout_s": 0.5}
    try:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, **options) as (sync, _):
            sync.publish(V0)
            proxy.move_to("http://127.0.0.1:1")
            with pytest.raises(NoEndpointServes, match="answered 500"):
                sync.publish(V1)
    finally:
        proxy.close()


def wait_until(condition, limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ---- the canary's prompts ------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [8, 9, 17, 31, 32, 33, 112, 500, None])
def test_canary_fits_into_the_context(limit):
    prompts = canary_prompts([Prompt(0, np.arange(5, dtype=np.int32), "", None)], limit)
    canary = Canary(prompts, 1.0, lambda groups, advantages: [], 1.0)
    lengths = {len(prompt.token_ids) for prompt in prompts}
    assert len(lengths) == 1
    total = lengths.pop() + canary._sampling.max_tokens
    assert total <= (limit or 112) and total >= min(limit or 112, 112) - 1
    assert canary._sampling.max_tokens >= 4


def test_a_context_too_short_for_a_canary_is_refused():
    with pytest.raises(ValueError, match="--max-model-len"):
        canary_prompts([Prompt(0, np.arange(5, dtype=np.int32), "", None)], 7)
