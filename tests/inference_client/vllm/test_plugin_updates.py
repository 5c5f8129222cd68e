"""Weight updates of a real vLLM: what is served afterwards, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from easyrl.inference_client.transfer.chunk_server import ChunkServer
from tests.inference_client.vllm.plugin_server import (
    PLUGIN_PATH,
    Answer,
    Artifact,
    PluginServer,
    TrainerSide,
    changed,
    proof_request,
    reference_logprobs,
    running,
)
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.vllm
PROMPT = list(range(5, 45))  # longer than two cache blocks
NUM_TOKENS = 16
FP32_TOLERANCE = 1e-4  # two implementations, 2 layers; printed differences are 3e-6
BF16_TOLERANCE = 0.1  # rounding of activations in bf16; another version's are off by whole nats


@pytest.fixture(scope="module", params=["tied-fp32", "untied-bf16"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PluginServer]:
    tied, dtype = {"tied-fp32": (True, "float32"), "untied-bf16": (False, "bfloat16")}[
        request.param
    ]
    directory = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(directory / "model", "qwen3", tied=tied, head_dim=32, seed=1)
    server = PluginServer(
        model,
        directory / "log",
        dtype=dtype,
        extension="faulty_worker.FaultyWorker",
        env={"PYTHONPATH": PLUGIN_PATH},
    )
    with running(server):
        yield server


@pytest.fixture
def trainer(server: PluginServer, tmp_path: Path) -> Iterator[TrainerSide]:
    trainer = TrainerSide(tmp_path / "root")
    server.must("/init_weight_transfer_engine", {"init_info": trainer.init_info()})
    yield trainer
    server.abandon()  # what a failed test has left open
    server.post("/resume")


@pytest.fixture
def weights(server: PluginServer) -> dict[str, Tensor]:
    """Those on disk, in the dtype that is served; every test makes its own from them."""
    return {name: w.to(dtype_of(server)) for name, w in on_disk(server).items()}


def on_disk(server: PluginServer) -> dict[str, Tensor]:
    return load_file(server.model / "model.safetensors")


def dtype_of(server: PluginServer) -> torch.dtype:
    return torch.bfloat16 if "bf16" in str(server.model) else torch.float32


def is_tied(server: PluginServer) -> bool:
    return "untied" not in str(server.model)


def assert_serves(server: PluginServer, weights: dict[str, Tensor], artifact: Artifact) -> None:
    """By its log-probabilities and by its proof."""
    tokens, logprobs = server.logprobs(PROMPT, NUM_TOKENS)
    expected = reference_logprobs(server.model, weights, PROMPT, tokens)
    tolerance = FP32_TOLERANCE if dtype_of(server) == torch.float32 else BF16_TOLERANCE
    assert (logprobs - expected).abs().max() <= tolerance
    shown = server.prove(artifact)
    assert shown.problems == {} and len(shown.proofs) == 1
    assert shown.names == artifact.checksums.keys()


def assert_refused(answer: Answer, *texts: str) -> None:
    assert 400 <= answer.status < 600, answer.text
    for text in texts:
        assert text in answer.text


# ---- what works --------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_new_weights(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    for seed in (1, 2):
        new = changed(weights, seed)
        artifact = trainer.write(f"v{seed}", new)
        server.update(artifact, f"test:0:{seed}")
        assert server.version() == f"test:0:{seed}"
        assert_serves(server, new, artifact)


def test_parts_of_a_layer_may_come_in_chunks_of_their_own(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    # one request: q, k and v take turns in the receiver's two buffers before they are needed
    new = changed(weights, 3)
    artifact = trainer.write("single", new, per_chunk=1)
    server.must("/start_weight_update")
    server.must("/update_weights", {"update_info": artifact.update_info()})
    server.must("/finish_weight_update", {"weight_version": "single"})
    server.must("/reset_prefix_cache")
    assert_serves(server, new, artifact)


def test_chunks_in_any_order(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    new = changed(weights, 4)
    artifact = trainer.write("reversed", new, per_chunk=2)
    server.update(replace(artifact, chunks=artifact.chunks[::-1]))
    assert_serves(server, new, artifact)


def test_over_http(server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]) -> None:
    new = changed(weights, 5)
    artifact = trainer.write("over-http", new)
    with closing(ChunkServer(trainer.root, trainer.token)) as chunks:
        server.must("/init_weight_transfer_engine", {"init_info": trainer.init_info(chunks.url)})
        server.update(artifact)
        (proof,) = server.prove(artifact).proofs
        assert proof.transport == "http"
        assert_serves(server, new, artifact)


def test_served_tensors_stay_where_they_are(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    # CUDA graphs hold addresses; packed layers have none on a CPU, norms and embeddings do
    addresses = {"method": "fault_addresses"}
    before = server.must("/collective_rpc", addresses)["results"]
    server.update(trainer.write("new", changed(weights, 6)))
    server.prove(trainer.write("again", changed(weights, 6)))
    assert server.must("/collective_rpc", addresses)["results"] == before
    assert sum(address != 0 for address in before[0]) >= 10


def test_an_update_equal_to_the_weights_on_disk_changes_nothing(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    artifact = trainer.write("as-on-disk", weights)
    server.update(artifact)
    assert_serves(server, weights, artifact)


# ---- abandoned and incomplete updates ----------------------------------------------------------


def test_an_update_that_is_abandoned_before_its_first_chunk_changes_nothing(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    new = changed(weights, 10)
    artifact = trainer.write("kept", new)
    server.update(artifact)
    server.must("/start_weight_update")
    assert_refused(server.abandon(), "abandoned")
    assert server.version() == "kept"
    assert_serves(server, new, artifact)


def test_after_an_abandoned_update_the_next_one_works(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    half = trainer.write("half", changed(weights, 11), per_chunk=3)
    server.must("/start_weight_update")
    server.must("/update_weights", {"update_info": half.update_info(half.chunks[:2])})
    assert_refused(server.post("/start_weight_update"), "already active")
    assert_refused(server.abandon(), "abandoned")
    server.logprobs(PROMPT, 2)  # it can be served, though it is a mixture
    assert server.prove(half).problems, "a half update must not pass for a whole one"
    new = changed(weights, 12)
    artifact = trainer.write("whole", new, per_chunk=3)
    server.update(artifact)
    assert_serves(server, new, artifact)


def test_a_new_trainer_takes_over_where_one_died(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    half = trainer.write("half", changed(weights, 13))
    server.must("/start_weight_update")
    server.must("/update_weights", {"update_info": half.update_info(half.chunks[:1])})
    shutil.rmtree(trainer.root)
    successor = TrainerSide(tmp_path / "successor")
    server.must("/init_weight_transfer_engine", {"init_info": successor.init_info()})
    assert_refused(server.abandon())
    new = changed(weights, 14)
    artifact = successor.write("v", new)
    server.update(artifact)
    assert_serves(server, new, artifact)


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_missing_tensor_fails_the_update(
    server: PluginServer,
    trainer: TrainerSide,
    weights: dict[str, Tensor],
    left_out: str,
    named: str,
) -> None:
    if left_out not in weights:
        pytest.skip("a tied head is not sent")
    whole = changed(weights, 15)
    artifact = trainer.write("gap", {n: w for n, w in whole.items() if n != left_out})
    version = server.version()
    server.must("/start_weight_update")
    server.must("/update_weights", {"update_info": artifact.update_info()})
    assert_refused(server.post("/finish_weight_update", {"weight_version": "gap"}), named)
    assert server.version() == version
    assert_refused(server.post("/start_weight_update"), "already active")  # vLLM's own bookkeeping
    assert_refused(server.abandon())
    complete = trainer.write("complete", whole)
    server.update(complete)
    assert_serves(server, whole, complete)


def test_chunks_of_two_artifacts_do_not_mix(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    one = trainer.write("one", changed(weights, 16))
    two = trainer.write("two", changed(weights, 17))
    server.must("/start_weight_update")
    server.must("/update_weights", {"update_info": one.update_info(one.chunks[:1])})
    mixed = server.post("/update_weights", {"update_info": two.update_info(two.chunks[1:])})
    assert_refused(mixed, "two", "one")
    server.update(two)
    assert server.prove(two).problems == {}


def test_a_tensor_that_comes_twice_is_refused(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    # counted, it could stand in for one that is missing
    artifact = trainer.write("v", weights)
    server.must("/start_weight_update")
    server.must("/update_weights", {"update_info": artifact.update_info(artifact.chunks[:1])})
    again = server.post(
        "/update_weights", {"update_info": artifact.update_info(artifact.chunks[:1])}
    )
    assert_refused(again, "came twice")


# ---- what a request may not do -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["unannounced", "dots", "absolute", "symlink", "wrong-hash", "missing-file", "wrong-shape"],
)
def test_bad_chunks_are_refused(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor], kind: str
) -> None:
    new = changed(weights, 20)
    artifact = trainer.write("good", new)
    chunk = artifact.chunks[0]
    info, expected = artifact.update_info([chunk]), ""
    if kind == "unannounced":
        elsewhere = TrainerSide(trainer.root.with_name("elsewhere")).write("good2", new)
        info, expected = elsewhere.update_info(), "good2"
    elif kind == "dots":
        info, expected = info | {"artifact": "../root/good"}, "plain name"
    elif kind == "absolute":
        path = str(artifact.directory / chunk["file"])
        info, expected = info | {"chunks": [chunk | {"file": path}]}, "plain name"
    elif kind == "symlink":
        (trainer.root / "link").symlink_to(artifact.directory)
        info, expected = info | {"artifact": "link"}, "link"
    elif kind == "wrong-hash":
        name = next(iter(chunk["checksums"]))
        hashes = chunk["checksums"] | {name: "0" * 64}
        info, expected = info | {"chunks": [chunk | {"checksums": hashes}]}, name
    elif kind == "missing-file":
        info = info | {"chunks": [chunk | {"file": "chunk-00077.safetensors"}]}
        expected = "chunk-00077"
    elif kind == "wrong-shape":
        shapes = new | {"model.norm.weight": torch.ones(7, dtype=dtype_of(server))}
        info, expected = trainer.write("bad", shapes).update_info(), ""
    server.must("/start_weight_update")
    assert_refused(server.post("/update_weights", {"update_info": info}), expected)
    server.update(artifact)
    assert_serves(server, new, artifact)


def test_a_wrong_token_is_refused(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    stranger = trainer.init_info() | {"token": "guessed"}
    answer = server.post("/init_weight_transfer_engine", {"init_info": stranger})
    assert_refused(answer, "another token")  # vLLM cuts the path out
    artifact = trainer.write("v", weights)
    server.update(artifact)  # the announcement before still holds
    with closing(ChunkServer(trainer.root, trainer.token)) as chunks:
        guess = trainer.init_info(chunks.url) | {"token": "guessed"}
        server.post("/init_weight_transfer_engine", {"init_info": guess})
        server.must("/start_weight_update")
        answer = server.post("/update_weights", {"update_info": artifact.update_info()})
        server.abandon()
    assert_refused(answer, "401")
    assert "guessed" not in answer.text


def test_an_unknown_key_is_named(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    info = trainer.init_info() | {"unknown": 1}
    assert_refused(server.post("/init_weight_transfer_engine", {"init_info": info}), "unknown")
    half = trainer.write("half", changed(weights, 21), per_chunk=3)
    server.must("/start_weight_update")
    server.must("/update_weights", {"update_info": half.update_info(half.chunks[:3])})
    assert_refused(server.post("/update_weights", {"update_info": {"unknown": 1}}), "unknown")
    # vLLM has closed the session; what waited for the rest of its layer must be gone
    new = changed(weights, 22)
    artifact = trainer.write("new", new)
    server.update(artifact)
    assert_serves(server, new, artifact)


# ---- the proof ---------------------------------------------------------------------------------


def test_a_missed_update_fails_the_proof_of_every_tensor(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    server.update(trainer.write("served", changed(weights, 30)))
    newer = trainer.write("newer", changed(weights, 31, scale=1e-2))
    shown = server.prove(newer)
    assert shown.names == set()
    assert shown.problems.keys() == newer.checksums.keys()


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        ("model.norm", "model.norm.weight"),
        ("model.embed_tokens", "model.embed_tokens.weight"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.gate_proj.weight"),
        ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_one_changed_number_fails_the_proof(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor], layer: str, named: str
) -> None:
    # the last bit or so of one number: 1e-7 in fp32
    delta = 1e-7 if dtype_of(server) == torch.float32 else 1e-2
    artifact = trainer.write("v", changed(weights, 32))
    server.update(artifact)
    arguments = {"layer": layer, "delta": str(delta)}
    server.must("/collective_rpc", {"method": "fault_change", "kwargs": arguments})
    shown = server.prove(artifact)
    assert shown.problems.keys() == {named}
    assert "checksum " in shown.problems[named]
    assert shown.names == artifact.checksums.keys() - {named}


def test_a_stale_head_fails_the_proof(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    packs = server.must("/collective_rpc", {"method": "fault_keep_head"})["results"][0]
    artifact = trainer.write("v", changed(weights, 33))
    server.update(artifact)
    assert server.prove(artifact).problems == {}
    server.must("/collective_rpc", {"method": "fault_stale_head"})
    problems = server.prove(artifact).problems
    named = "model.embed_tokens.weight" if is_tied(server) else "lm_head.weight"
    assert problems.keys() == {named}
    assert ("packed copy in ParallelLMHead" in problems[named]) == (packs == "True")


def test_an_artifact_with_less_or_more_than_is_served_fails_the_proof(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    new = changed(weights, 34)
    server.update(trainer.write("v", new))
    name = "model.layers.0.self_attn.v_proj.weight"
    fewer = trainer.write("fewer", {n: w for n, w in new.items() if n != name})
    problems = server.prove(fewer).problems
    assert problems.keys() == {"model.layers.0.self_attn.qkv_proj.weight"}
    assert "not in the artifact" in next(iter(problems.values()))


def test_weights_that_were_rounded_fail_the_proof(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    finer = {n: w.to(torch.float64) for n, w in weights.items()}
    finer = {n: w + 1e-9 for n, w in finer.items()}
    artifact = trainer.write("finer", finer)
    server.update(artifact)
    problems = server.prove(artifact).problems
    assert problems.keys() == artifact.checksums.keys()
    assert "--dtype" in problems["model.norm.weight"]


def test_the_proof_needs_no_artifact_and_no_answer_serves_twice(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    """The worker reads what it serves, whatever became of the files."""
    artifact = trainer.write("v", weights)
    server.update(artifact)
    shutil.rmtree(artifact.directory)
    first, second = server.prove(artifact), server.prove(artifact)
    assert first.problems == second.problems == {}
    name = "model.norm.weight"
    digests = [shown.proofs[0].slices[name][0].digest for shown in (first, second)]
    assert digests[0] != digests[1]


def test_a_question_without_a_nonce_or_of_other_dtypes_is_refused(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    artifact = trainer.write("v", weights)
    request = proof_request(artifact)
    for changes, text in (
        ({"nonce": "00"}, "64 hex digits"),
        ({"tensors": '{"w": ["F3", []]}'}, "F3"),
    ):
        asked = request | {"kwargs": request["kwargs"] | changes}
        assert_refused(server.post("/collective_rpc", asked), text)
    assert server.prove(artifact).problems.keys() <= artifact.checksums.keys()


def test_no_proof_while_an_update_is_open(
    server: PluginServer, trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    artifact = trainer.write("v", weights)
    server.update(artifact)
    server.must("/start_weight_update")
    answer = server.post("/collective_rpc", proof_request(artifact))
    assert_refused(server.abandon())
    assert_refused(answer, "update is open")
    assert server.prove(artifact).problems == {}
