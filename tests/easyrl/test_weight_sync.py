"""Weight sync against real servers, some of them behind a proxy that lies."""

from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from benchmarks.random_model import write_random_model
from easyrl.agreement import Agreement
from easyrl.canary import Canary, canary_prompts
from easyrl.config import InferenceConfig, ModelConfig, WeightSyncConfig
from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.dataloaders.packing import dummy_micro_batch, pack_groups
from easyrl.inference_client.launch import EmbeddedServerProcess
from easyrl.inference_client.pool import EndpointPool
from easyrl.policy_model import load_policy_model, run_micro_batch
from easyrl.schema import PolicyVersion, Prompt
from easyrl.weight_sync import NoEndpointServes, WeightSync
from tests.end_to_end.proxy import Proxy, reply

TOLERANCE = 1e-3
V0, V1 = PolicyVersion("sync", 0, 0), PolicyVersion("sync", 0, 1)


class PlainEngine:
    """The part of ``TrainEngine`` that weight sync uses, over one unsharded model."""

    rank = dp_rank = 0
    dp_size = 1
    lockstep = False

    def __init__(self, model_dir: Path) -> None:
        self.policy = load_policy_model(ModelConfig(path=model_dir, dtype="fp32"))

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


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("sync") / "model", hidden_size=64, num_layers=2
    )


@pytest.fixture(scope="module")
def server(model_dir):
    with EmbeddedServerProcess(model_dir, ["--num-threads", "1"]) as process:
        yield process.url


@contextmanager
def weight_sync(engine, urls, tmp_path, **options):
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
                mask_truncated=False,
                max_tokens_per_micro_batch=512,
            )

        sync = WeightSync(
            config=WeightSyncConfig(directory=tmp_path, **options),
            tolerance=TOLERANCE,
            run_name="sync",
            engine=engine,
            pool=pool,
            thread=thread,
            agreement=Agreement(0, 1),
            canary=Canary(canary_prompts(prompts, 256), 1.0, pack, 60.0),
            dummy=dummy_micro_batch,
        )
        opened.callback(sync.close)
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
        (ForgetsItsVersion, {"probe": False}, "serves version 'default'"),
    ],
    ids=["stale", "stale-and-lying", "stale-and-lying-at-the-probe", "version"],
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


def test_the_others_go_on_without_a_liar(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    with EmbeddedServerProcess(model_dir, ["--num-threads", "1"]) as second_server:
        proxy = ForgetsItsVersion(second_server.url)
        try:
            with weight_sync(engine, [server, proxy.url], tmp_path, probe=False) as (sync, pool):
                sync.publish(V0)
                assert statuses(pool)[0] == "confirmed sync:0:0"
                assert "serves version 'default'" in statuses(pool)[1]
        finally:
            proxy.close()


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
