"""The plugin with tensor parallelism: two workers, each with its shard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.inference_client.vllm.plugin_server import (
    PLUGIN_PATH,
    PluginServer,
    TrainerSide,
    changed,
    reference_logprobs,
    running,
)
from tests.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="vLLM binds each worker to a core of its own"
    ),
]
PROMPT = list(range(5, 45))
TOLERANCE = 1e-4  # fp32, two implementations


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginServer]:
    directory = tmp_path_factory.mktemp("parallel")
    model = save_tiny_model(directory / "model", "qwen3", tied=True, head_dim=32, seed=1)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    server = PluginServer(
        model,
        directory / "log",
        *("--tensor-parallel-size", "2"),
        extension="faulty_worker.FaultyWorker",
        env={
            "VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}",
            "PYTHONPATH": PLUGIN_PATH,
        },
    )
    with running(server):
        yield server


def test_two_workers_update_prove_and_refuse_in_step(server: PluginServer, tmp_path: Path) -> None:
    trainer = TrainerSide(tmp_path / "root")
    server.must("/init_weight_transfer_engine", {"init_info": trainer.init_info()})
    weights = load_file(server.model / "model.safetensors")
    for seed in (1, 2):
        new = changed(weights, seed)
        artifact = trainer.write(f"v{seed}", new)
        server.update(artifact)
        tokens, logprobs = server.logprobs(PROMPT, 16)
        expected = reference_logprobs(server.model, new, PROMPT, tokens)
        assert (logprobs - expected).abs().max() <= TOLERANCE
        shown = server.prove(artifact)
        assert len(shown.proofs) == 2
        assert shown.problems == {} and shown.names == artifact.checksums.keys()
        cut = "model.layers.0.mlp.down_proj.weight"  # by columns, the worker's own half
        halves = [proof.slices[cut][0].slice for proof in shown.proofs]
        assert {half.starts[1] for half in halves} == {0, halves[0].sizes[1]}

        # refused by both workers: each reply must be read, or later calls take it for theirs
        server.must("/start_weight_update")
        bad = artifact.update_info() | {"artifact": "nowhere"}
        assert "nowhere" in server.post("/update_weights", {"update_info": bad}).text
        server.must("/start_weight_update")
        assert server.post("/finish_weight_update").status >= 400
        assert "already active" in server.post("/start_weight_update").text
        assert "abandoned" in server.abandon().text

    name = "model.layers.0.mlp.down_proj"
    arguments = {"layer": name, "delta": "1e-7"}
    server.must("/collective_rpc", {"method": "fault_change", "kwargs": arguments})
    findings = server.prove(artifact).findings
    assert [wrong.keys() for wrong in findings.wrong] == [{f"{name}.weight"}] * 2
