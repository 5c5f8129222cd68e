"""Rewards that ask servers: what is sent, what comes back, retries, keys, and what is refused."""

from __future__ import annotations

import asyncio
import datetime
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards import worker
from easyrl.rewards.functions import check_rewards, keywords
from easyrl.rewards.http_request import RequestFailed
from easyrl.rewards.remote import remote
from easyrl.rewards.reward_model import reward_model
from easyrl.rewards.trial import try_rewards
from easyrl.runtime.machine import free_port
from easyrl.runtime.workers.worker_pool import WorkerPool
from easyrl.schema import Prompt
from tests.easyrl.rewards.scripted_server import scripted
from tests.tiny_models import random_completion
from tests.tiny_tokenizer import tiny_tokenizer

TEXTS = ["one", "two", "three"]
IDS = [np.array(ids, np.int32) for ids in ([7], [8, 9], [])]
DAY = datetime.date(2026, 11, 23)


def prompt(index: int = 0, **metadata: Any) -> Prompt:
    ids = np.array([1, 2], np.int32)
    return Prompt(index, ids, "1+1?", "2", 3, metadata, "p.jsonl:1", "be brief")


def classified(*rows: list[Any]) -> dict[str, Any]:
    data = [{"index": i, "probs": row, "num_classes": len(row)} for i, row in enumerate(rows)]
    return {"object": "list", "model": "m", "data": data}


# ---- remote ----


async def test_a_remote_reward_is_sent_the_prompt_and_its_responses():
    asked = prompt(level=3, day=DAY, nothing=float("nan"), array=np.array([1, 2]))
    async with scripted(lambda number, body: (200, {"rewards": [1, 0.5, -2]})) as server:
        found = await remote(asked, TEXTS, IDS, urls=[server.url + "/score"], timeout_s=5.0)
    assert found == [1.0, 0.5, -2.0]
    ((path, headers, body),) = server.requests
    assert path == "/score" and headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert body == {
        "prompt": "1+1?",
        "system": "be brief",
        "answer": "2",
        "metadata": {"level": 3, "day": "2026-11-23", "nothing": None, "array": [1, 2]},
        "location": "p.jsonl:1",
        "index": 0,
        "epoch": 3,
        "responses": TEXTS,
    }


async def test_token_ids_are_sent_where_they_are_asked_for():
    async with scripted(lambda number, body: (200, {"rewards": [0, 0, 0]})) as server:
        urls = [server.url + "/score"]
        await remote(prompt(), TEXTS, IDS, urls=urls, timeout_s=5.0, send_token_ids=True)
    ((_, _, body),) = server.requests
    assert body["prompt_token_ids"] == [1, 2] and body["response_token_ids"] == [[7], [8, 9], []]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"rewards": [1, 2]}), "gives 2 rewards for 3 responses"),
        ((200, {"rewards": [1, 2, "3"]}), "gives '3' for response 2, no finite number"),
        ((200, {"rewards": [1, True, 3]}), "gives True for response 1, no finite number"),
        ((200, '{"rewards": [1, NaN, 3]}'), "gives nan for response 1, no finite number"),
        ((200, '{"rewards": [1, 1e999, 3]}'), "gives inf for response 1, no finite number"),
        ((200, {"scores": [1, 2, 3]}), r"answers \{'scores': .*; expected \{\"rewards\""),
        ((200, [1, 2, 3]), r"answers \[1, 2, 3\]; expected"),
        ((200, "<html>hello</html>"), "answers no JSON: <html>hello</html>"),
        ((200, "[" * 100_000), r"answers no JSON: \[\["),
        ((404, {"detail": "Not Found"}), r"/score answers 404: .*Not Found.*; correct its URL"),
        ((401, "who?"), "answers 401: who\\?; set kwargs.api_key_env"),
        ((422, "no such field"), "answers 422: no such field$"),
        ((302, ""), "answers 302: nothing$"),
    ],
)
async def test_an_answer_that_is_no_reward_is_said_at_once(answer, message):
    async with scripted(lambda number, body: answer) as server:
        with pytest.raises(RequestFailed, match=message):
            await remote(prompt(), TEXTS, IDS, urls=[server.url + "/score"], timeout_s=5.0)
    assert len(server.requests) == 1


async def test_an_answer_without_end_is_not_read():
    async with scripted(lambda number, body: (200, "1" * (17 * 2**20))) as server:
        with pytest.raises(RequestFailed, match="answers with more than 16777216 bytes"):
            await remote(prompt(), TEXTS, IDS, urls=[server.url], timeout_s=5.0)


# ---- retries ----


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_a_server_that_is_busy_is_asked_again(status):
    def answer(number: int, body: Any) -> tuple[int, Any]:
        return (200, {"rewards": [1, 2, 3]}) if number == 2 else (status, "later")

    async with scripted(answer) as server:
        found = await remote(prompt(), TEXTS, IDS, urls=[server.url], timeout_s=5.0)
    assert found == [1.0, 2.0, 3.0] and len(server.requests) == 3


async def test_who_fails_leaves_the_request_to_the_next():
    closed = f"http://127.0.0.1:{free_port()}/score"
    async with scripted(lambda number, body: (200, {"rewards": [1, 2, 3]})) as server:
        urls = [closed, server.url]
        for index in range(2):  # begins with the one, and with the other
            assert await remote(prompt(index), TEXTS, IDS, urls=urls, timeout_s=5.0) == [1, 2, 3]
    assert len(server.requests) == 2


async def test_a_server_that_hangs_leaves_time_for_another():
    hanging = scripted(lambda number, body: (30.0, 200, {}))
    async with hanging as first, scripted(lambda n, body: (200, {"rewards": [1, 2, 3]})) as second:
        urls = [first.url, second.url]
        assert await remote(prompt(), TEXTS, IDS, urls=urls, timeout_s=1.0) == [1, 2, 3]


async def test_the_error_comes_before_the_worker_would_be_killed():
    start_s = time.monotonic()
    async with scripted(lambda number, body: (503, "busy")) as server:
        with pytest.raises(RequestFailed, match="no answer within 1 s in .* answers 503: busy"):
            await remote(prompt(), TEXTS, IDS, urls=[server.url], timeout_s=1.0)
    assert time.monotonic() - start_s < 1.0
    assert 2 <= len(server.requests) <= 10  # with longer and longer pauses
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RequestFailed, match=f"no answer within 0.5 s in .*; the last: {url}: .*"):
        await remote(prompt(), TEXTS, IDS, urls=[url], timeout_s=0.5)


# ---- keys ----

KEY = "a-secret-of-32-characters-or-more"


async def test_the_key_is_sent_and_never_repeated(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    async with scripted(lambda number, body: (403, f"Bearer {KEY} may not")) as server:
        with pytest.raises(RequestFailed, match="answers 403: Bearer .* may not") as caught:
            await remote(
                prompt(), TEXTS, IDS, urls=[server.url], timeout_s=5.0, api_key_env="JUDGE_KEY"
            )
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(caught.value)


async def test_a_key_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_env: the environment variable JUDGE_KEY is not"):
        await remote(prompt(), TEXTS, IDS, urls=["http://h"], timeout_s=5, api_key_env="JUDGE_KEY")


# ---- reward model ----


async def test_a_reward_model_reads_token_ids_in_one_request():
    async with scripted(lambda number, body: (200, classified([0.5], [-1], [2.0]))) as server:
        found = await reward_model(
            prompt(), TEXTS, IDS, urls=[server.url], timeout_s=5.0, model="judge"
        )
    assert found == [0.5, -1.0, 2.0]
    ((path, _, body),) = server.requests
    assert path == "/classify"
    assert body == {
        "input": [[1, 2, 7], [1, 2, 8, 9], [1, 2]],
        "use_activation": False,
        "model": "judge",
    }


async def test_a_reward_model_reads_text_or_a_chat():
    async with scripted(
        lambda n, body: (200, classified(*[[1.0]] * len(body.get("input", [0]))))
    ) as server:
        for kind in ("text", "chat"):
            found = await reward_model(
                prompt(), TEXTS, IDS, urls=[server.url], timeout_s=5.0, input=kind
            )
            assert found == [1.0, 1.0, 1.0]
    first, *others = [body for _, _, body in server.requests]
    assert first == {"input": ["1+1?one", "1+1?two", "1+1?three"], "use_activation": False}
    chats = sorted(
        (body["messages"] for body in others), key=lambda m: TEXTS.index(m[1]["content"])
    )
    question = {"role": "user", "content": "1+1?"}
    assert chats == [[question, {"role": "assistant", "content": text}] for text in TEXTS]


async def test_scores_come_in_the_order_of_their_index():
    answer = classified([1.0], [2.0], [3.0])
    answer["data"].reverse()
    async with scripted(lambda number, body: (200, answer)) as server:
        found = await reward_model(prompt(), TEXTS, IDS, urls=[server.url], timeout_s=5.0)
    assert found == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {"detail": "Not Found"}), "/classify answers 404: .*; serve a sequence-classific"),
        ((200, classified([0.1, 0.9], [1, 0], [1, 0])), "a model with 2 labels; a reward model ha"),
        ((200, classified([1], [2])), "gives 2 scores for 3 responses"),
        ((200, classified([1], [None], [2])), "gives None for response 1; is the model whole"),
        ((200, '{"data": [{"index": 0, "probs": [NaN]}]}'), "gives 1 scores for 3"),
        ((200, classified([1], ["2"], [2])), "gives '2' for response 1, no number"),
        ((200, {"data": [{"index": 0}] * 3}), "gives no score for response 0"),
        ((200, {"choices": []}), "expected vLLM's list 'data'; serve a sequence-classification"),
    ],
)
async def test_an_answer_that_is_no_score_is_said_at_once(answer, message):
    async with scripted(lambda number, body: answer) as server:
        with pytest.raises(RequestFailed, match=message):
            await reward_model(prompt(), TEXTS, IDS, urls=[server.url], timeout_s=5.0)


async def test_a_score_that_is_not_finite_is_said():
    text = '{"data": [{"index": 0, "probs": [NaN]}]}'
    async with scripted(lambda number, body: (200, text)) as server:
        with pytest.raises(RequestFailed, match="gives nan for response 0; is the model whole"):
            await reward_model(prompt(), TEXTS[:1], IDS[:1], urls=[server.url], timeout_s=5.0)


# ---- in a configuration ----


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("remote", {}, r"rewards\[0\]\.kwargs: remote takes .*'urls'; give what it takes"),
        ("remote", {"urls": []}, "urls: List should have at least 1"),
        ("remote", {"urls": "http://h"}, "urls: Input should be a valid list"),
        ("remote", {"urls": ["h:9000"]}, "urls.0: is no http:// or https:// URL; write it"),
        ("remote", {"urls": ["http://me:word@h"]}, "urls.0: a URL with a user name"),
        ("remote", {"urls": ["http://h"], "api_key_env": "a b"}, "is the name of an environment"),
        ("reward_model", {"urls": ["http://h/v1"]}, "urls.0: .*leave off /v1"),
        ("reward_model", {"urls": ["http://h?a=1"]}, "urls.0: .*query or fragment"),
        ("reward_model", {"urls": ["http://h"], "input": "ids"}, "input: .*'tokens', 'text' or"),
    ],
)
def test_wrong_kwargs_are_refused_at_the_start(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        check_rewards([RewardConfig(name=name, kwargs=kwargs)])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"urls": ["http://me:s3cr3tword@h"]},
        {"urls": ["http://h"], "api_key_env": "s3cr3tword-x"},
    ],
)
def test_a_refusal_shows_no_key(kwargs):
    for name in ("remote", "reward_model"):
        with pytest.raises(ConfigError) as caught:
            check_rewards([RewardConfig(name=name, kwargs=kwargs)])
        assert "s3cr3tword" not in str(caught.value)


async def test_a_slash_behind_a_base_url_is_none_before_the_route():
    async with scripted(lambda number, body: (200, classified([1.0]))) as server:
        await reward_model(prompt(), TEXTS[:1], IDS[:1], urls=[server.url + "/"], timeout_s=5.0)
    assert server.requests[0][0] == "/classify"


def test_the_time_limit_is_the_rewards_own_key():
    reward = RewardConfig(name="remote", timeout_s=7.0, kwargs={"urls": ["http://h/score?v=1"]})
    check_rewards([reward])
    assert keywords(reward)["timeout_s"] == 7.0 and reward.of_group
    assert not reward.model_copy(update={"scope": "sample"}).of_group
    with pytest.raises(ValueError, match="kwargs: timeout_s is a key of the reward itself"):
        RewardConfig(name="remote", kwargs={"urls": ["http://h"], "timeout_s": 7.0})


async def test_a_trial_call_finds_a_server_that_is_not_there(tmp_path: Path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    completions = [random_completion(np.random.default_rng(0), size) for size in (2, 3)]
    async with scripted(lambda n, body: (200, {"rewards": [0] * len(body["responses"])})) as server:
        rewards = [
            RewardConfig(name="exact"),
            RewardConfig(name="remote", kwargs={"urls": [server.url]}),
            RewardConfig(
                name="remote",
                log_as="other",
                timeout_s=1.0,
                kwargs={"urls": [f"http://127.0.0.1:{free_port()}"]},
            ),
        ]
        workers = WorkerPool(1, worker.initialize, (rewards, tmp_path / "tokenizer"))
        await workers.start()
        try:
            await try_rewards(rewards[:2], workers, prompt(), completions)
            assert [len(body["responses"]) for _, _, body in server.requests] == [2]
            with pytest.raises(
                ConfigError,
                match=r"rewards\[2\]: kwargs.urls: other failed: no answer within 1 s .*"
                "; start its servers, or correct what is wrong",
            ):
                await try_rewards(rewards, workers, prompt(), completions)
        finally:
            await asyncio.shield(workers.close())
