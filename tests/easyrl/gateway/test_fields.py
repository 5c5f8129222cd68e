"""Every field of a request is honoured, forced, ignored or refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import completion_create_params

from easyrl.config import SamplingConfig
from easyrl.gateway import fields
from easyrl.gateway.errors import BadRequest
from easyrl.gateway.fields import check_fields
from easyrl.gateway.requests import chat_request, generate_request
from tests.easyrl.gateway.gateway_parts import served, user

PAGE = Path(__file__).parents[3] / "docs/environments.md"
CHAT = {"messages": [user("what is it?")]}
TOKENS = {"token_ids": [1]}
# of the chat route, by the openai client's name for them
HONOURED = {
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
}


@pytest.mark.parametrize(
    "body, path, field",
    [
        ({**CHAT, "temprature": 0.2}, "chat", "temprature: .*correct it to temperature"),
        ({**CHAT, "web_search_options": {}}, "chat", "web_search_options: there is no such field"),
        ({**CHAT, "sampling_params": {"seed": 1}}, "chat", "sampling_params"),
        ({**CHAT, "stream": True, "stream_options": {"x": 1}}, "chat", r"stream_options\.x"),
        ({**CHAT, "watermarking": True}, "chat", "watermarking"),
        ({**CHAT, "chat_template": "x"}, "chat", "chat_template: .*data.chat_template"),
        ({**CHAT, "reasoning_effort": "low"}, "chat", "reasoning_effort: .*chat_template_kwargs"),
        ({**CHAT, "x" * 1000: 1}, "chat", "x{80}…: there"),
        ({**TOKENS, "temperature": 0.2}, "tokens", "temperature: stands in sampling_params"),
        ({**TOKENS, "tools": []}, "tokens", "tools"),
        ({**TOKENS, "sampling_params": {"typo": 1}}, "tokens", r"sampling_params\.typo"),
        ({**TOKENS, "sampling_params": {"extra_args": {"a": 1}}}, "tokens", "extra_args"),
        ({**TOKENS, "sampling_params": {"max_token": 1}}, "tokens", "correct it to max_tokens"),
    ],
)
async def test_a_field_of_no_class_is_refused_by_its_name(tmp_path, body, path, field):
    route = "/v1/chat/completions" if path == "chat" else "/inference/v1/generate"
    async with served(tmp_path) as gateway:
        status, said = await gateway.post(body, route)
        assert status == 400 and re.search(field, said["error"]["message"])
        assert said["error"]["message"].startswith(said["error"]["param"] + ": ")
        assert not gateway.trainer.asked


async def test_who_asks_and_what_a_provider_keeps_is_ignored(tmp_path):
    harmless: dict[str, Any] = {name: "any" for name in fields.IGNORED}
    harmless |= {"metadata": {"run": "1"}, "store": True, "priority": 3}
    async with served(tmp_path) as gateway:
        plain = await gateway.chat(*CHAT["messages"])
        told = await gateway.chat(*CHAT["messages"], **harmless, unknown=None, logit_bias=None)
        assert plain["content"] == "answer 1" and told["content"] == "answer 2"
        first, second = gateway.trainer.asked
        assert (first.prompt_ids, first.max_tokens) == (second.prompt_ids, second.max_tokens)
        params = {"detokenize": False, "skip_special_tokens": True, "typo": None}
        body = {**TOKENS, **harmless, "sampling_params": params}
        assert (await gateway.post(body, "/inference/v1/generate"))[0] == 200


def test_each_field_of_the_openai_client_is_in_a_class():
    """Of those of today's client; a newer one's are refused until they are."""
    base = completion_create_params.CompletionCreateParamsBase
    names = {*base.__annotations__, "stream"} - HONOURED
    refused = {"moderation", "web_search_options"}  # they ask for a service that there is not
    for name in sorted(names - refused - fields.IGNORED - {*fields.TRAININGS}):
        assert name in fields.FORCED, name
        for neutral in fields.FORCED[name]:
            check_fields({name: neutral}, (), SamplingConfig())
        with pytest.raises(BadRequest, match=name):
            check_fields({name: object()}, (), SamplingConfig())
    for name in refused:
        with pytest.raises(BadRequest, match=name):
            check_fields({name: {}}, (), SamplingConfig())


def test_a_field_is_in_one_class_alone():
    classes = [HONOURED, {*fields.TRAININGS}, {*fields.FORCED}, {*fields.IGNORED}]
    assert sum(map(len, classes)) == len(set().union(*classes))


def test_both_routes_take_what_training_does_itself():
    sampling = SamplingConfig(temperature=0.7, top_k=5)
    own = {name: getattr(sampling, name) for name in fields.TRAININGS}
    neutral = {name: values[0] for name, values in fields.FORCED.items() if values}
    chat_request(json.dumps({**CHAT, **own, **neutral}).encode(), sampling)
    body = {**TOKENS, "sampling_params": {**own, **neutral}}
    generate_request(json.dumps(body).encode(), sampling)


def test_the_page_names_every_field():
    text = PAGE.read_text(encoding="utf-8")
    for name in (*HONOURED, *fields.TRAININGS, *fields.FORCED, *fields.IGNORED):
        assert f"`{name}`" in text, name
