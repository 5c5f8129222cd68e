"""The embedded classifier over HTTP: the logits are Hugging Face's, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, PreTrainedModel

from easyrl.inference_client.servers.embedded.classifier import Classifier, is_classifier
from easyrl.inference_client.servers.embedded.classifier_routes import ClassifierServer, activated
from easyrl.inference_client.servers.embedded.server import start_site
from easyrl.rewards.http_request import RequestFailed
from easyrl.rewards.reward_model import reward_model
from easyrl.schema import Prompt
from tests.inference_client.tiny_classifier import save_classifier, save_tiny_classifier
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

TOLERANCE = 1e-5  # fp32 logits of size 1
LENGTHS = (1, 3, 3, 17, 40)


def sequences(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, token_ids: list[list[int]]) -> list[list[float]]:
    """Hugging Face's own forward; causal models without a padding token read the last one."""
    return [model(input_ids=torch.tensor([ids])).logits[0].tolist() for ids in token_ids]


@asynccontextmanager
async def serving(
    model: Path, api_key: str | None = None, **settings: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    server = ClassifierServer(Classifier(model, **settings), "judge")
    runner, url = await start_site(server.app(api_key), "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(url) as http:
            yield http, url
    finally:
        await runner.cleanup()
        server.close()


async def classify(http: aiohttp.ClientSession, **body: Any) -> tuple[int, Any]:
    async with http.post("/classify", json=body) as response:
        return response.status, await response.json()


def probs(answer: Any) -> list[list[float]]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [each["probs"] for each in answer["data"]]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("num_labels", [1, 3])
async def test_logits_are_hugging_faces(tmp_path, family, num_labels):
    model = save_tiny_classifier(tmp_path, family, num_labels=num_labels)
    expected = expected_logits(model, sequences())
    async with serving(tmp_path) as (http, _):
        status, answer = await classify(http, input=sequences(), use_activation=False)
        assert status == 200
        np.testing.assert_allclose(probs(answer), expected, atol=TOLERANCE, rtol=0)
        assert len({round(row[0], 3) for row in expected}) == len(LENGTHS)  # they do differ
        _, single = await classify(http, input=sequences()[3], use_activation=False)
        assert probs(single) == [probs(answer)[3]]
        _, answer = await classify(http, input=sequences())
    scores = torch.tensor(expected)
    wanted = scores.sigmoid() if num_labels == 1 else scores.softmax(-1)
    np.testing.assert_allclose(probs(answer), wanted, atol=TOLERANCE, rtol=0)
    assert answer["data"][0]["num_classes"] == num_labels
    assert answer["usage"]["prompt_tokens"] == sum(LENGTHS)


def test_activations_do_not_overflow():
    assert activated([1000.0]) == [1.0] and activated([-1000.0]) == [0.0]
    assert activated([1000.0, 0.0]) == [1.0, 0.0]


async def test_the_last_token_is_read_whatever_it_is(tmp_path):
    """transformers reads the token before it, where the last one is also the padding token."""
    model = save_tiny_classifier(tmp_path, pad_token_id=7)
    token_ids = [5, 6, 7]
    before = expected_logits(model, [[5, 6], token_ids])
    assert before[0] == pytest.approx(before[1], abs=TOLERANCE)
    with torch.inference_mode():
        hidden = model.model(input_ids=torch.tensor([token_ids])).last_hidden_state
        expected = model.score(hidden)[0, -1].tolist()
    async with serving(tmp_path) as (http, _):
        _, answer = await classify(http, input=[token_ids], use_activation=False)
    assert probs(answer)[0] == pytest.approx(expected, abs=TOLERANCE)
    assert abs(expected[0] - before[1][0]) > 1e-2


async def test_an_encoder_is_served_too(tmp_path):
    config = BertConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=1,
        max_position_embeddings=64,
    )
    model = save_classifier(tmp_path, config)
    inputs = [[5, 0, 9], [3]]  # 0 is its padding token
    with torch.inference_mode():
        ids = [torch.tensor([each]) for each in inputs]
        wanted = [model(input_ids=x, attention_mask=torch.ones_like(x)).logits[0, 0] for x in ids]
    async with serving(tmp_path) as (http, _):
        _, answer = await classify(http, input=inputs, use_activation=False)
    np.testing.assert_allclose([row[0] for row in probs(answer)], wanted, atol=TOLERANCE, rtol=0)


async def test_text_and_chats_are_tokenised_by_the_server(tmp_path):
    model = save_tiny_classifier(tmp_path)
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    texts = ["one", "seven", rendered]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    expected = expected_logits(model, ids)
    async with serving(tmp_path) as (http, _):
        _, answer = await classify(http, input=texts[:2], use_activation=False)
        np.testing.assert_allclose(probs(answer), expected[:2], atol=TOLERANCE, rtol=0)
        _, answer = await classify(http, messages=chat, use_activation=False)
        np.testing.assert_allclose(probs(answer), expected[2:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "give either input or messages"),
        ({"input": []}, 400, "give either input or messages"),
        ({"input": [[]]}, 400, "input: must not be empty"),
        ({"input": [[1], [257]]}, 400, "input: token id out of vocabulary, ids are 0 to 256"),
        ({"input": [[-1]]}, 400, "greater than or equal to 0"),
        ({"input": [[1] * 513]}, 400, "513 tokens exceed the maximum model length of 512"),
        ({"input": "a"}, 400, "text needs a tokenizer"),
        ({"messages": [{"role": "user", "content": "a"}]}, 400, "messages: need a chat template"),
        ({"input": [[1]], "model": "other"}, 404, "The model `other` does not exist"),
    ],
)
async def test_what_cannot_be_read_is_refused(tmp_path, body, status, message):
    save_tiny_classifier(tmp_path, tokenizer=False)
    async with serving(tmp_path) as (http, _):
        found, answer = await classify(http, **body)
    assert found == status and message in answer["error"]["message"]


async def test_its_other_routes_and_its_key(tmp_path):
    save_tiny_classifier(tmp_path)
    async with serving(tmp_path, api_key="secret", max_model_len=64) as (http, _):
        assert (await http.get("/health")).status == 200
        assert (await http.get("/v1/models")).status == 401
        headers = {"Authorization": "Bearer secret"}
        async with http.get("/v1/models", headers=headers) as response:
            (card,) = (await response.json())["data"]
        assert (card["id"], card["max_model_len"]) == ("judge", 64)
        assert (await classify(http, input=[[1]]))[0] == 401


def test_a_folder_without_a_whole_classifier_is_refused(tmp_path):
    save_tiny_classifier(tmp_path / "whole")
    assert is_classifier(tmp_path / "whole") and not is_classifier(tmp_path)
    save_tiny_model(tmp_path / "language", "qwen3")
    assert not is_classifier(tmp_path / "language")
    with pytest.raises(ValueError, match=r"no weights for 1 parameters, score.weight first"):
        Classifier(tmp_path / "language")
    with pytest.raises(ValueError, match="max_model_len: must be from 1 to the model's 512"):
        Classifier(tmp_path / "whole", max_model_len=513)
    with pytest.raises(ValueError, match="dtype: must be one of float32"):
        Classifier(tmp_path / "whole", dtype="int8")


# ---- as the reward ----


def prompt(token_ids: list[int]) -> Prompt:
    return Prompt(1, np.array(token_ids, np.int32), "1+1?", "2")


@pytest.mark.parametrize("kind", ["tokens", "text", "chat"])
async def test_the_reward_is_hugging_faces_logit(tmp_path, kind):
    model, tokenizer = save_tiny_classifier(tmp_path), tiny_tokenizer()
    asked, texts = prompt([1, 2, 3]), ["2", "three", "22"]
    token_ids = [np.array(ids, np.int32) for ids in ([4, 5], [6], [7, 8, 9])]
    if kind == "tokens":
        whole = [[1, 2, 3, *ids.tolist()] for ids in token_ids]
    else:
        chats = [
            [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": text}]
            for text in texts
        ]
        rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        inputs = rendered if kind == "chat" else ["1+1?" + text for text in texts]
        whole = tokenizer(inputs, add_special_tokens=False)["input_ids"]
    expected = [row[0] for row in expected_logits(model, whole)]
    async with serving(tmp_path) as (_, url):
        found = await reward_model(asked, texts, token_ids, urls=[url], timeout_s=30.0, input=kind)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


async def test_a_model_that_is_no_reward_model_is_said(tmp_path):
    ids = [np.array([4], np.int32)]
    save_tiny_classifier(tmp_path / "two", num_labels=2)
    async with serving(tmp_path / "two") as (_, url):
        with pytest.raises(RequestFailed, match="serves a model with 2 labels; a reward model has"):
            await reward_model(prompt([1]), ["a"], ids, urls=[url], timeout_s=30.0)
    save_tiny_classifier(tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    async with serving(tmp_path / "broken") as (_, url):
        with pytest.raises(RequestFailed, match="gives None for response 0; is the model whole"):
            await reward_model(prompt([1]), ["a"], ids, urls=[url], timeout_s=30.0)


# ---- as a process ----


def test_easyrl_serve_serves_a_classifier(tmp_path):
    model = save_tiny_classifier(tmp_path)
    command = [sys.executable, "-m", "easyrl", "serve", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rpartition(" ")[2]
        ids = [np.array([4, 5], np.int32)]
        asked = reward_model(prompt([1]), ["a"], ids, urls=[url], timeout_s=60.0)
        (found,) = asyncio.run(asked)
        assert found == pytest.approx(expected_logits(model, [[1, 4, 5]])[0][0], abs=TOLERANCE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
