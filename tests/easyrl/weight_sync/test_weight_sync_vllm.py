"""Weight sync against real vLLM, whose prefix cache and tied head are its own."""

from contextlib import closing
from pathlib import Path

import pytest

from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.servers.managed.launch import VllmServerProcess
from easyrl.schema import NoEndpointServes, PolicyVersion
from tests.easyrl.weight_sync.weight_sync_parts import (
    FailsHalfWay,
    MissesUpdates,
    PlainEngine,
    Watched,
    weight_sync,
)
from tests.end_to_end.proxy import reply
from tests.tiny_models import save_tiny_model
from tests.vllm_environment import VLLM_PYTHON

pytestmark = pytest.mark.vllm
V0, V1 = PolicyVersion("sync", 0, 0), PolicyVersion("sync", 0, 1)


class ForgetsTheReset(Watched):
    """Its upstream keeps the keys and values of prompts that were computed by older weights.

    vLLM's own pause forgets them too, unless it is told not to.
    """

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == "/reset_prefix_cache":
            return reply({"success": True})
        if request.path == "/pause":
            return await self.forward("POST", "/pause?mode=wait&clear_cache=false")
        return None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return save_tiny_model(folder, "qwen3", tied=True, head_dim=32)  # the least that vLLM serves


@pytest.fixture(scope="module")
def server(model_dir):
    options = ["--max-model-len", "512", "--max-num-seqs", "8", "--skip-tokenizer-init"]
    with VllmServerProcess(
        model_dir, Path(VLLM_PYTHON), options, log=model_dir.with_name("log"), start_timeout_s=240
    ) as process:
        yield process.url


@pytest.mark.parametrize("transport", ["file", "http"])
def test_each_version_is_proved(transport, model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    options = {"transport": transport, "chunk_bytes": 2**14}
    with weight_sync(engine, [server], tmp_path, **options) as rank:
        rank.sync.publish(V0)
        engine.train(1e-1)
        metrics = rank.sync.publish(V1).metrics
        assert rank.statuses() == {server: "confirmed sync:0:1"}
        assert metrics["sync/canary_mean"] < 1e-5


def test_a_mixture_of_two_versions_makes_no_token(model_dir, server, tmp_path):
    """An update that fails half way leaves the layers that have come, which owe their proof."""
    engine = PlainEngine(model_dir)
    options = {"chunk_bytes": 2**10, "probe": False}  # more chunks than go into one request
    with closing(FailsHalfWay(server)) as proxy:
        with weight_sync(engine, [proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
            engine.train(1e-1)
            proxy.fails = True
            with pytest.raises(NoEndpointServes, match="out of luck"):
                rank.sync.publish(V1)
            (endpoint,) = rank.pool.endpoints
            with pytest.raises(EndpointUnavailable, match="answered 500"):
                rank.thread.run(rank.sync.canary.sample(endpoint))


def test_a_forgotten_reset_of_the_prefix_cache_is_caught(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    with weight_sync(engine, [server], tmp_path) as rank:
        rank.sync.publish(V0)  # its canary leaves prefixes of these weights
    engine.train(1e-1)
    with closing(ForgetsTheReset(server)) as proxy:
        with weight_sync(engine, [proxy.url], tmp_path) as rank:
            with pytest.raises(NoEndpointServes, match="canary: log-probabilities differ") as found:
                rank.sync.publish(V0)
            assert proxy.url in str(found.value)


def test_a_tiny_step_that_was_missed_is_caught_and_healed(model_dir, server, tmp_path, caplog):
    engine = PlainEngine(model_dir)
    with closing(MissesUpdates(server, first=2, num_missed=1)) as proxy:
        with weight_sync(engine, [proxy.url], tmp_path) as rank:
            rank.sync.publish(V0)
            engine.train(1e-7)
            rank.sync.publish(V1)
            assert f"{proxy.url}: worker 0 of 1 serves other weights" in caplog.text
            assert "first model." in caplog.text
            assert rank.statuses() == {proxy.url: "confirmed sync:0:1"}
