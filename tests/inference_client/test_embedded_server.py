"""The server's routes over HTTP: shapes as vLLM's, refusals, authentication, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from easyrl.inference_client.client import EndpointClient, WorkerProof
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.server import main, start_site
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from easyrl.weight_sync.challenge import Challenge, Findings, shapes_of
from tests.inference_client.served_tensors import ArtifactInMemory
from tests.inference_client.written_artifact import write_artifact

EOS = 62
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens are single letters."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=63,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    vocab = {letter: i for i, letter in enumerate(LETTERS)} | {"<eos>": EOS}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(directory)
    return directory


@asynccontextmanager
async def serving(
    model: Path, api_key: str | None = None, **settings: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, str, EmbeddedEngine]]:
    engine = EmbeddedEngine(model, dtype="float32", **settings)
    runner, url = await start_site(EmbeddedServer(engine, "tiny").app(api_key), "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(url) as http:
            yield http, url, engine
    finally:
        await runner.cleanup()
        engine.close()


async def post(
    http: aiohttp.ClientSession, route: str, body: Any = None, **kwargs: Any
) -> tuple[int, Any]:
    async with http.post(route, json=body, **kwargs) as response:
        return response.status, await response.json()


async def get(http: aiohttp.ClientSession, route: str) -> tuple[int, Any]:
    async with http.get(route) as response:
        return response.status, await response.json()


def generate_body(**sampling: Any) -> dict[str, Any]:
    params = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0, "seed": 1, **sampling}
    return {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": params}


async def test_generate_has_the_shape_of_vllm(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, _):
        status, reply = await post(http, "/inference/v1/generate", generate_body(n=2))
        assert status == 200
        assert reply["model"] == "tiny" and reply["output_mode"] == "tokens"
        assert reply["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 16,
            "total_tokens": 19,
        }
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        for choice in reply["choices"]:
            assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
            assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
            content = choice["logprobs"]["content"]
            assert [entry["token_id"] for entry in content] == choice["token_ids"]
            for entry in content:
                assert entry["logprob"] < 0
                assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        body = generate_body()
        del body["sampling_params"]["logprobs"], body["sampling_params"]["max_tokens"]
        _, reply = await post(http, "/inference/v1/generate", body)
        (choice,) = reply["choices"]
        assert choice["logprobs"] is None
        assert len(choice["token_ids"]) == 253  # what the model's length leaves, as vLLM


async def test_stop_strings_end_a_response_of_the_token_route(
    model_dir: Path, tmp_path: Path
) -> None:
    async with serving(model_dir) as (http, url, _):
        _, reply = await post(http, "/inference/v1/generate", generate_body())
        free = reply["choices"][0]["token_ids"]
        text = "".join(LETTERS[token] for token in free if token != EOS)
        stop = text[3:5]
        async with aiohttp.ClientSession() as session:
            assert (await EndpointClient(url, session).served_model()).applies_stop_strings
        _, reply = await post(http, "/inference/v1/generate", generate_body(stop=[stop]))
        (cut,) = reply["choices"]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
        assert cut["token_ids"] == free[: text.index(stop) + 2] != free
    for file in model_dir.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    async with serving(tmp_path) as (http, url, _):
        async with aiohttp.ClientSession() as session:
            assert not (await EndpointClient(url, session).served_model()).applies_stop_strings
        status, reply = await post(http, "/inference/v1/generate", generate_body(stop=[stop]))
        assert status == 400 and "stop strings need a tokenizer" in reply["error"]["message"]


async def test_top_logprobs_list_the_sampled_token_first(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, _):
        body = generate_body(logprobs=3, temperature=2.0)
        _, reply = await post(http, "/inference/v1/generate", body)
        for entry in reply["choices"][0]["logprobs"]["content"]:
            top = entry["top_logprobs"]
            assert len(top) == 3 and top[0]["token_id"] == entry["token_id"]
            assert top[0]["rank"] == entry["rank"]
            others = [(other["rank"], other["logprob"]) for other in top[1:]]
            assert others == sorted(others)
            assert all(a[1] >= b[1] for a, b in zip(others, others[1:], strict=False))


async def test_openai_client(model_dir: Path) -> None:
    async with serving(model_dir, api_key="secret") as (_, url, _):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            ids = [LETTERS.index(letter) for letter in "hello"]
            settings: dict[str, Any] = dict(
                model="tiny", max_tokens=12, seed=5, logprobs=2, extra_body={"ignore_eos": True}
            )
            by_text = await client.completions.create(prompt="hello", **settings)
            by_ids = await client.completions.create(prompt=ids, **settings)
            (choice,) = by_text.choices
            assert choice.text == by_ids.choices[0].text and len(choice.text) == 12
            assert choice.logprobs is not None and choice.logprobs.tokens == list(choice.text)
            assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
            assert by_text.usage is not None and by_text.usage.completion_tokens == 12

            settings["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
            many = await client.completions.create(prompt=["hello", "abc"], n=2, **settings)
            assert [c.index for c in many.choices] == [0, 1, 2, 3]
            assert many.choices[0].text == choice.text
            extra = many.choices[3].model_extra or {}
            assert extra["prompt_token_ids"] == [0, 1, 2]
            assert "".join(LETTERS[i] for i in extra["token_ids"]) == many.choices[3].text

            stop = choice.text[4:6]
            stopped = await client.completions.create(prompt="hello", stop=stop, **settings)
            assert stopped.choices[0].text == choice.text[: choice.text.index(stop)]
            assert stopped.choices[0].finish_reason == "stop"

            stream = await client.completions.create(
                prompt="hello", stream=True, stream_options={"include_usage": True}, **settings
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.text for chunk in chunks for c in chunk.choices) == choice.text
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12

            with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
                await client.completions.create(model="other", prompt="a")
            with pytest.raises(openai.BadRequestError, match="echo is not supported"):
                await client.completions.create(model="tiny", prompt="a", echo=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids.1"),
        ({"token_ids": [1, 63]}, "out of vocabulary"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": [1] * 250}, "exceed the maximum model length of 256"),
        ({"sampling_params": None}, "sampling_params"),
        ({"stream": True}, "stream is not supported"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": "many"}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 2, "min_tokens": 3}}, "min_tokens must not exceed"),
        ({"sampling_params": {"temperature": 0, "n": 2}}, "n must be 1"),
        ({"sampling_params": {"logit_bias": {"1": 2}}}, "logit_bias is not supported"),
        ({"sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs is not supported"),
        ({"sampling_params": {"stop": [""]}}, "stop cannot contain an empty string"),
        ({"sampling_params": {"n": 1000}}, "at most max_num_seqs"),
    ],
    ids=str,
)
async def test_bad_generate_requests_name_the_field(
    model_dir: Path, change: dict[str, Any], message: str
) -> None:
    async with serving(model_dir) as (http, _, _):
        status, reply = await post(http, "/inference/v1/generate", generate_body() | change)
        assert status == 400, reply
        assert message in reply["error"]["message"]
        assert reply["error"]["code"] == 400


async def test_bad_bodies_and_routes(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, _):
        async with http.post("/v1/completions", data=b"{not json") as response:
            assert response.status == 400
            assert "body: is not JSON" in (await response.json())["error"]["message"]
        for body in ({}, {"prompt": ""}, {"prompt": []}, {"prompt": ["a", ""]}):
            status, reply = await post(http, "/v1/completions", body)
            assert status == 400 and "prompt" in reply["error"]["message"]
        assert (await post(http, "/pause?mode=nap"))[0] == 400
        assert (await post(http, "/weight_checker", {"action": "compare"}))[0] == 400
        assert (await post(http, "/update_weights", {}))[1]["error"]["param"] == "update_info"
        status, reply = await post(http, "/finish_weight_update", {})
        assert status == 400 and "no weight update is open" in reply["error"]["message"]
        assert (await post(http, "/v1/unknown", {}))[0] == 404
        # what vLLM does not know either is ignored, as there
        assert (await post(http, "/inference/v1/generate", generate_body(colour="red")))[0] == 200


async def test_every_route_but_probes_asks_for_the_key(model_dir: Path) -> None:
    async with serving(model_dir, api_key="secret") as (http, _, engine):
        app = EmbeddedServer(engine, "tiny").app("secret")
        routes = {(route.method, route.resource.canonical) for route in app.router.routes()}  # type: ignore[union-attr]
        assert ("POST", "/update_weights") in routes and len(routes) > 18
        probes = {(method, path) for method in ("GET", "HEAD") for path in ("/health", "/metrics")}
        for method, path in routes - probes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                async with http.request(method, path, headers=headers) as response:
                    assert response.status == 401, path
        for _, path in probes:
            async with http.get(path) as response:
                assert response.status == 200
        key = {"Authorization": "Bearer secret"}
        assert (await post(http, "/inference/v1/generate", generate_body(), headers=key))[0] == 200


async def test_weight_update_over_http(model_dir: Path, tmp_path: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    changed = {name: tensor * 1.5 for name, tensor in weights.items()}
    told = Announcement(tmp_path / "root", "run")
    artifact = write_artifact(changed.items(), told.root / "v1", "run:0:1", 1 << 13)
    async with serving(model_dir) as (http, _, _):
        assert (await get(http, "/weight_info"))[1] == {"weight_version": "default"}
        assert (await get(http, "/get_world_size"))[1] == {"world_size": 1}
        before = (await post(http, "/inference/v1/generate", generate_body()))[1]
        assert (await post(http, "/start_weight_update"))[0] == 400  # before a trainer is known
        body = {"init_info": told.init_info("file")}
        assert (await post(http, "/init_weight_transfer_engine", body))[0] == 200
        assert (await post(http, "/pause?mode=keep"))[1] == {"status": "paused"}
        assert (await get(http, "/is_paused"))[1] == {"is_paused": True}
        assert (await post(http, "/start_weight_update"))[0] == 200
        assert len(artifact.chunks) > 1
        for chunk in artifact.chunks:
            info = artifact.update_info([chunk])
            status, reply = await post(http, "/update_weights", {"update_info": info})
            assert (status, reply) == (200, {"message": "Weights updated"})
        finish = {"weight_version": artifact.version}
        assert (await post(http, "/finish_weight_update", finish))[0] == 200
        assert (await post(http, "/reset_prefix_cache"))[1] == {"success": True}
        assert (await post(http, "/resume"))[1] == {"status": "resumed"}
        _, reply = await post(http, "/weight_checker", {"action": "checksum"})
        assert reply["checksums"] == artifact.checksums
        compare = {"action": "compare", "baseline": artifact.checksums | {"lm_head.weight": "0"}}
        _, reply = await post(http, "/weight_checker", compare)
        assert reply == {"match": False, "mismatches": ["lm_head.weight"]}
        asked = Challenge(shapes_of(artifact.chunks), ArtifactInMemory(changed))
        kwargs = {"nonce": asked.nonce.hex(), "tensors": json.dumps(asked.tensors)}
        rpc = {"method": "easyrl_prove_weights", "kwargs": kwargs}
        _, reply = await post(http, "/collective_rpc", rpc)
        (proof,) = msgspec.convert(reply["results"], list[WorkerProof])
        assert (proof.problems, proof.transport) == ({}, "file")
        assert asked.check([proof]) == Findings([{}], [])
        rpc["kwargs"] = kwargs | {"nonce": "0"}
        assert (await post(http, "/collective_rpc", rpc))[0] == 400
        after = (await post(http, "/inference/v1/generate", generate_body()))[1]
        (old,), (new,) = before["choices"], after["choices"]
        assert new["weight_versions"] == [{"version": "run:0:1", "start": 0, "end": 8}]
        assert new["logprobs"] != old["logprobs"]
        await post(http, "/update_weight_version", {"new_version": "renamed"})
        assert (await get(http, "/weight_info"))[1] == {"weight_version": "renamed"}


async def test_failed_update_answers_400_then_503(model_dir: Path, tmp_path: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    told = Announcement(tmp_path / "root", "run")
    artifact = write_artifact(weights.items(), told.root / "v1", "v1", 1 << 20)
    (chunk,) = artifact.chunks
    info = artifact.update_info()
    info["chunks"][0]["checksums"] = dict.fromkeys(chunk.checksums, "0" * 64)
    async with serving(model_dir) as (http, _, _):
        body = {"init_info": told.init_info("file")}
        await post(http, "/init_weight_transfer_engine", body)
        await post(http, "/start_weight_update")
        status, reply = await post(http, "/update_weights", {"update_info": info})
        assert (
            status == 400
            and f"tensor {min(chunk.checksums)!r} has hash" in reply["error"]["message"]
        )
        status, reply = await post(http, "/inference/v1/generate", generate_body())
        assert status == 503 and "the last weight update failed" in reply["error"]["message"]
        assert (await get(http, "/weight_info"))[1] == {"weight_version": "default"}


async def test_abandoned_update_answers_an_error_and_the_next_one_works(
    model_dir: Path, tmp_path: Path
) -> None:
    weights = load_file(model_dir / "model.safetensors")
    told = Announcement(tmp_path / "root", "run")
    artifact = write_artifact(weights.items(), told.root / "v1", "v1", 1 << 13)
    assert len(artifact.chunks) > 1
    abandon = {"update_info": {"abandon": True}}
    finish = {"weight_version": "v1"}
    async with serving(model_dir) as (http, _, _):
        body = {"init_info": told.init_info("file")}
        await post(http, "/init_weight_transfer_engine", body)
        await post(http, "/start_weight_update")
        assert (await post(http, "/start_weight_update"))[0] == 400
        part = {"update_info": artifact.update_info(artifact.chunks[:1])}
        assert (await post(http, "/update_weights", part))[0] == 200
        status, reply = await post(http, "/update_weights", abandon)
        assert status == 400 and "abandoned" in reply["error"]["message"]
        assert (await post(http, "/inference/v1/generate", generate_body()))[0] == 503
        assert (await post(http, "/start_weight_update"))[0] == 200
        assert (await post(http, "/update_weights", part))[0] == 200
        status, reply = await post(http, "/finish_weight_update", finish)
        assert status == 400 and "did not arrive" in reply["error"]["message"]
        assert (await get(http, "/weight_info"))[1] == {"weight_version": "default"}
        await post(http, "/start_weight_update")
        whole = {"update_info": artifact.update_info()}
        assert (await post(http, "/update_weights", whole))[0] == 200
        assert (await post(http, "/finish_weight_update", finish))[0] == 200
        assert (await post(http, "/inference/v1/generate", generate_body()))[0] == 200


async def test_weights_come_over_http_too(model_dir: Path, tmp_path: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    changed = {name: tensor * 1.5 for name, tensor in weights.items()}
    told = Announcement(tmp_path / "root", "run")
    artifact = write_artifact(changed.items(), told.root / "v1", "v1", 1 << 13)
    with closing(ChunkServer(told.root, told.token)) as chunks:
        async with serving(model_dir) as (http, _, engine):
            body = {"init_info": told.init_info("http", chunks.url)}
            assert (await post(http, "/init_weight_transfer_engine", body))[0] == 200
            await post(http, "/start_weight_update")
            whole = {"update_info": artifact.update_info()}
            assert (await post(http, "/update_weights", whole))[0] == 200
            finish = {"weight_version": "v1"}
            assert (await post(http, "/finish_weight_update", finish))[0] == 200
            asked = engine.weights.prove(bytes(32), artifact.checksums.keys())
            proof = await asyncio.wrap_future(asked)
            assert (proof.transport, proof.problems) == ("http", {})


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"artifact": "v1"},
        {"artifact": "../v1", "chunks": [{"file": "f", "num_bytes": 1, "checksums": {}}]},
        {"artifact": "v1", "chunks": [{"file": "/etc/passwd", "num_bytes": 1, "checksums": {}}]},
        {"artifact": "v1", "chunks": [{"file": "f", "num_bytes": -1, "checksums": {}}]},
        {"artifact": "v1", "chunks": [{"file": "f", "num_bytes": 1, "checksums": {"a": "0"}}]},
        {"artifact": "v1", "chunks": [{"file": "f"}]},
    ],
)
async def test_malformed_updates_are_refused(
    model_dir: Path, tmp_path: Path, info: dict[str, Any]
) -> None:
    told = Announcement(tmp_path / "root", "run")
    async with serving(model_dir) as (http, _, _):
        body = {"init_info": told.init_info("file")}
        await post(http, "/init_weight_transfer_engine", body)
        await post(http, "/start_weight_update")
        assert (await post(http, "/update_weights", {"update_info": info}))[0] == 400


async def test_overload_answers_503_and_recovers(model_dir: Path) -> None:
    async with serving(model_dir, max_queue=2) as (http, _, engine):
        await post(http, "/pause?mode=keep")
        waiting = asyncio.gather(
            *(post(http, "/inference/v1/generate", generate_body()) for _ in range(2))
        )
        while engine.num_waiting < 2:
            await asyncio.sleep(0.01)
        status, reply = await post(http, "/inference/v1/generate", generate_body())
        assert status == 503 and "the queue holds 2" in reply["error"]["message"]
        await post(http, "/resume")
        assert [status for status, _ in await waiting] == [200, 200]
        assert (await post(http, "/inference/v1/generate", generate_body()))[0] == 200


async def test_a_client_that_hangs_up_aborts_its_request(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, engine):
        await post(http, "/pause?mode=keep")
        gone = asyncio.create_task(post(http, "/inference/v1/generate", generate_body()))
        while engine.num_waiting < 1:
            await asyncio.sleep(0.01)
        gone.cancel()
        while engine.num_waiting > 0:
            await asyncio.sleep(0.01)
        await post(http, "/resume")
        assert (await post(http, "/inference/v1/generate", generate_body()))[0] == 200
        assert engine.stats.generated_tokens == 8


async def test_abort_by_id_over_http(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, engine):
        await post(http, "/pause?mode=keep")
        body = generate_body() | {"request_id": "mine"}
        waiting = asyncio.create_task(post(http, "/inference/v1/generate", body))
        while engine.num_waiting < 1:
            await asyncio.sleep(0.01)
        _, reply = await post(http, "/abort_requests", {"request_ids": ["mine"]})
        assert reply == {"status": "aborted", "aborted": 1}
        status, reply = await waiting
        assert status == 200 and reply["choices"][0]["finish_reason"] == "abort"
        assert reply["choices"][0]["token_ids"] == []


def test_command_serves_and_ends_on_sigterm(model_dir: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "easyrl.inference_client.servers.embedded.server",
        str(model_dir),
    ]
    process = subprocess.Popen(
        [*command, "--port", "0", "--dtype", "float32", "--num-threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EASYRL_API_KEY": "from-env"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "ready at http://127.0.0.1:" in line
        url = line.split()[-1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="from-env") as client:
            reply = client.completions.create(model=str(model_dir), prompt="abc", max_tokens=3)
            assert reply.usage is not None and reply.usage.prompt_tokens == 3
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key-env", "EASYRL_TEST_KEY"], "--api-key-env: EASYRL_TEST_KEY is not set"),
        (["--api-key-env", "EASYRL_EMPTY_KEY"], "is empty; every request would pass"),
        (["--api-key", ""], "is empty; every request would pass"),
    ],
)
def test_command_refuses_a_key_that_is_none(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EASYRL_TEST_KEY", raising=False)
    monkeypatch.setenv("EASYRL_EMPTY_KEY", "")
    assert main([str(tmp_path), "--port", "0", *options]) == 2
    assert message in capsys.readouterr().err


def test_command_refuses_a_folder_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--port", "0"]) == 2
    assert "config.json is missing" in capsys.readouterr().err
