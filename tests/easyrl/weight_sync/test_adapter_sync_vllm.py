"""Adapters alone against real vLLM: what it computes, proves, and is caught with."""

import logging
import os
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import requests
import torch

from easyrl.inference_client.servers.managed.launch import VllmServerProcess
from easyrl.ledger.checkpoints.export import export_adapter
from easyrl.schema import NoEndpointServes, PolicyVersion
from easyrl.weight_sync.proof import Shown
from tests.easyrl.weight_sync.adapter_endpoint import LORA, LoraEngine
from tests.easyrl.weight_sync.weight_sync_parts import Watched, stamps, weight_sync
from tests.end_to_end.proxy import reply
from tests.inference_client.vllm.plugin_server import PLUGIN_PATH, reference_logprobs
from tests.tiny_models import save_tiny_model
from tests.vllm_environment import VLLM_PYTHON

pytestmark = pytest.mark.vllm
V0, V1, V2 = (PolicyVersion("sync", 0, v) for v in range(3))
PROMPT = list(range(8, 16))  # of ``Rank.generate``
FP32_TOLERANCE = 1e-4  # two implementations, 2 layers, as in test_plugin_updates
LAYER = "model.layers.0.mlp.down_proj.base_layer"


class ForgetsTheReset(Watched):
    """Its upstream keeps the keys and values of prompts that were computed by older adapters."""

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == "/reset_prefix_cache":
            return reply({"success": True})
        if request.path == "/pause":
            return await self.forward("POST", "/pause?mode=wait&clear_cache=false")
        return None


class KnowsOneName(ForgetsTheReset):
    """... and gives every adapter the same name, and the same path."""

    async def answer(self, request, body):
        own = await super().answer(request, body)
        if own is not None:
            return own
        renamed = re.sub(
            rb'(\\?"(?:adapter|lora_name|model)\\?":\\?")sync[-\w]*|(?<="easyrl:)sync[-\w]*',
            rb"\1one",
            body,
        )
        if renamed == body:
            return None
        return await self.forward(request.method, request.path_qs, renamed)


def start(folder: Path, env=None, **options) -> VllmServerProcess:
    return VllmServerProcess(
        folder / "model",
        Path(VLLM_PYTHON),
        [
            *("--max-model-len", "512", "--max-num-seqs", "8", "--skip-tokenizer-init"),
            *("--worker-extension-cls", "faulty_worker.FaultyWorker"),
        ],
        log=folder / "log",
        start_timeout_s=240,
        env={"PYTHONPATH": PLUGIN_PATH} | (env or {}),
        lora_rank=LORA.rank,
        **options,
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return save_tiny_model(folder, "qwen3", tied=True, head_dim=32)  # the least that vLLM serves


@pytest.fixture(scope="module")
def server(model_dir):
    with start(model_dir.parent) as process:
        yield process.url


@pytest.fixture
def engine(model_dir):
    torch.manual_seed(0)
    return LoraEngine(model_dir)


def fault(server: str, name: str, **arguments: str) -> None:
    body = {"method": f"fault_{name}", "kwargs": arguments}
    requests.post(f"{server}/collective_rpc", json=body, timeout=60).raise_for_status()


def sync_of(engine, urls, directory, lora="adapter", **options):
    return weight_sync(engine, urls, directory, lora_config=LORA, lora=lora, **options)


@pytest.mark.parametrize("transport", ["file", "http"])
def test_each_version_is_served_and_proved(
    transport, engine, model_dir, server, tmp_path, record_property
):
    options = {"transport": transport, "chunk_bytes": 2**12}
    with sync_of(engine, [server], tmp_path, **options) as rank:
        for version in (V0, V1):
            engine.train(1e-1)
            metrics = rank.sync.publish(version).metrics
            assert rank.statuses() == {server: f"confirmed {version}"}
            assert metrics["sync/canary_mean"] < 1e-5
            adapter = dict(engine.named_weights("adapter"))
            assert metrics["sync/bytes"] == sum(w.nbytes for w in adapter.values())
            (shown,) = rank.sync.confirmations
            assert shown.proof.num_tensors == len(adapter) == 28 and shown.proof.whole
            assert shown.base.num_tensors == len(dict(engine.named_weights("base")))
            made = rank.generate(str(version)).result(60)
            assert stamps(made) == {str(version)}
            merged = {name: weight.clone() for name, weight in engine.named_weights()}
            tokens = made.token_ids.tolist()
            expected = reference_logprobs(model_dir, merged, PROMPT, tokens).numpy()
            assert np.abs(made.logprobs - expected).max() < FP32_TOLERANCE
            listed = requests.get(f"{server}/v1/models", timeout=30).json()["data"]
            names = [card["id"] for card in listed]
            assert f"sync-0-{version.v}" in names and f"sync-0-{version.v}-probe" not in names
            assert version == V0 or "sync-0-0" not in names
        full = sum(weight.nbytes for weight in merged.values())
        print(f"bytes per sync: adapter {metrics['sync/bytes']:.0f}, whole model {full}")
        assert 5 * metrics["sync/bytes"] < full  # rank 4 beside a hidden size of 32: 6 times


def test_a_stale_adapter_under_the_new_name_is_caught(engine, server, tmp_path, caplog):
    with sync_of(engine, [server], tmp_path, probe=False, canary=False) as rank:
        rank.sync.publish(V0)
        engine.train(1e-7)
        fault(server, "keep_adapter", keeps="yes")
        try:
            with pytest.raises(NoEndpointServes, match=f"other weights than version {V1}"):
                rank.sync.publish(V1)
        finally:
            fault(server, "keep_adapter", keeps="no")
        assert "lora_A.weight (checksum" in caplog.text


def test_a_forgotten_reset_does_no_harm_to_another_name(engine, server, tmp_path):
    """vLLM's cached prefixes belong to an adapter's name."""
    engine.train(1e-1)
    with closing(ForgetsTheReset(server)) as proxy:
        with sync_of(engine, [proxy.url], tmp_path) as rank:
            assert rank.sync.publish(V0).metrics["sync/canary_mean"] < 1e-5


def test_a_cached_prefix_of_another_adapter_is_caught(engine, server, tmp_path):
    engine.train(1e-2)  # what only two of the canary's tokens show must not be off by nats
    with closing(KnowsOneName(server)) as proxy:
        with sync_of(engine, [proxy.url], tmp_path, probe=False) as rank:
            rank.sync.publish(V0)
        with sync_of(engine, [proxy.url], tmp_path) as rank:
            with pytest.raises(NoEndpointServes, match="canary: log-probabilities differ"):
                rank.sync.publish(V0)


def test_a_slot_that_a_strangers_adapter_took_is_given_back(engine, model_dir, server, tmp_path):
    """vLLM has one, unless it was started with --max-loras."""
    folder = tmp_path / "stranger"
    export_adapter(engine.named_weights("adapter"), LORA, model_dir, folder)
    engine.train(1e-1)
    with sync_of(engine, [server], tmp_path) as rank:
        rank.sync.publish(V0)
        body = {"lora_name": "stranger", "lora_path": str(folder)}
        requests.post(f"{server}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
        body = {"model": "stranger", "prompt": PROMPT, "max_tokens": 2}
        made = requests.post(f"{server}/v1/completions", json=body, timeout=60)
        assert made.status_code == 200, made.text
        (endpoint,), shown = rank.pool.endpoints, Shown()
        proving = rank.sync._prover.prove_bits(endpoint, rank.sync._current, str(V0), shown)
        rank.thread.run(proving)
        assert shown.proof.num_tensors == 28
        assert stamps(rank.generate(str(V0)).result(60)) == {str(V0)}
        body = {"lora_name": "stranger"}
        requests.post(f"{server}/v1/unload_lora_adapter", json=body, timeout=60).raise_for_status()


def test_another_model_below_is_told_and_sent(engine, server, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    fault(server, "change", layer=LAYER, delta="0.5")
    with sync_of(engine, [server], tmp_path) as rank:
        with pytest.raises(NoEndpointServes, match="does not serve the model below the adapter"):
            rank.sync.publish(V0)
    # with B zero the merged model is the base
    with sync_of(engine, [server], tmp_path, lora="auto") as rank:
        assert rank.sync.publish(V1).metrics["sync/canary_mean"] < 1e-5
        assert rank.sync.confirmations[0].base is None
        assert "the whole model is sent at every sync" in caplog.text
    with sync_of(engine, [server], tmp_path) as rank:
        engine.train(1e-1)
        assert rank.sync.publish(V2).metrics["sync/canary_mean"] < 1e-5


def test_tensor_parallel_workers_prove_their_slices(engine, model_dir, tmp_path, caplog):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"}
    with start(model_dir.parent, env, tensor_parallel=2) as process:
        with sync_of(engine, [process.url], tmp_path) as rank:
            for version in (V0, V1):
                engine.train(1e-1)
                assert rank.sync.publish(version).metrics["sync/canary_mean"] < 1e-5
                (shown,) = rank.sync.confirmations
                assert shown.proof.num_workers == 2 and not shown.proof.whole
            engine.train(1e-7)
            fault(process.url, "keep_adapter", keeps="yes")
            with pytest.raises(NoEndpointServes, match="serves other weights than version"):
                rank.sync.publish(V2)  # then it is asked for the probe again
            assert f"worker 0 of 2 serves other weights than version {V2}" in caplog.text
