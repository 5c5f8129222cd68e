"""The ``openai`` package, unmodified, against the gateway."""

import openai
import pytest

from easyrl.gateway.messages import Refused
from tests.easyrl.gateway.gateway_parts import (
    ADD,
    KEY,
    SESSION,
    STAMP,
    call_text,
    served,
    tool,
    user,
)

QUESTION = user("what is it?")


def client_of(gateway, **settings):
    settings = {"base_url": gateway.url + "/v1", "api_key": KEY, "max_retries": 0, **settings}
    return openai.AsyncOpenAI(**settings)


async def test_an_answer_has_text_usage_log_probabilities_and_stamps(tmp_path):
    async with served(tmp_path) as gateway, client_of(gateway) as client:
        gateway.trainer.says = ["the answer"]
        made = await client.chat.completions.create(
            model="any", messages=[QUESTION], logprobs=True, max_tokens=7, temperature=1.0
        )
        sampled = gateway.trainer.answered[0]
        (choice,) = made.choices
        assert choice.message.content == "the answer" and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert made.usage.completion_tokens == len(sampled)
        assert made.usage.prompt_tokens == len(gateway.trainer.prompt(0))
        assert "".join(t.token for t in choice.logprobs.content) == "the answer<|im_end|>"
        logprobs = [t.logprob for t in choice.logprobs.content]
        assert logprobs == [-(n + 1) / 8 for n in range(len(sampled))]
        assert choice.model_extra["weight_versions"] == [
            {"version": STAMP, "start": 0, "end": len(sampled)}
        ]
        assert gateway.trainer.asked[0].max_tokens == 7


async def test_a_stream_is_the_finished_record_in_parts(tmp_path):
    async with served(tmp_path) as gateway, client_of(gateway) as client:
        gateway.trainer.says = ["the answer"]
        stream = await client.chat.completions.create(
            model="any",
            messages=[QUESTION],
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        parts = [part async for part in stream]
        text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        assert text == "the answer" and parts[0].choices[0].delta.role == "assistant"
        assert parts[-2].choices[0].finish_reason == "stop"
        assert parts[-1].usage.completion_tokens == len(gateway.trainer.answered[0])
        said = [
            t
            for p in parts
            if p.choices and p.choices[0].logprobs
            for t in p.choices[0].logprobs.content
        ]
        assert len(said) == len(gateway.trainer.answered[0])


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_are_called_and_their_results_continue_the_sampled_ids(tmp_path, streams):
    async with served(tmp_path) as gateway, client_of(gateway) as client:
        gateway.trainer.says = [f"{call_text(a=1)}\n{call_text(a=2)}", "3"]
        messages = [QUESTION]
        if streams:
            async with client.chat.completions.stream(
                model="any", messages=messages, tools=[ADD]
            ) as stream:
                made = await stream.get_final_completion()
        else:
            made = await client.chat.completions.create(
                model="any", messages=messages, tools=[ADD], tool_choice="auto"
            )
        (choice,) = made.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert [c.function.name for c in choice.message.tool_calls] == ["add", "add"]
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in messages[-1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)  # of the stream helper, not OpenAI's
        messages += [tool({"id": c.id}, c.function.arguments) for c in choice.message.tool_calls]
        final = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
        assert final.choices[0].message.content == "3"
        begun = gateway.trainer.prompt(0) + gateway.trainer.answered[0]
        assert gateway.trainer.prompt(1)[: len(begun)] == begun


async def test_a_header_names_the_session_too(tmp_path):
    async with served(tmp_path) as gateway:
        headers = {"X-Session-Id": SESSION}
        async with client_of(
            gateway, base_url=gateway.root + "/v1", default_headers=headers
        ) as client:
            assert [m.id async for m in client.models.list()] == ["policy"]
            made = await client.chat.completions.create(model="any", messages=[QUESTION])
            assert made.choices[0].message.content == "answer 1"
        async with client_of(gateway, base_url=gateway.root + "/v1") as client:
            with pytest.raises(openai.BadRequestError, match="X-Session-Id"):
                await client.models.list()


async def test_what_the_trainer_refuses_is_the_clients_own_error(tmp_path):
    async with served(tmp_path) as gateway, client_of(gateway) as client:
        gateway.trainer.says = [
            Refused(0, 400, "9 tokens of 8", "context_length_exceeded"),
            Refused(0, 400, "at most 3 turns", "max_turns_exceeded"),
            Refused(0, 503, "the run is interrupted"),
        ]
        with pytest.raises(openai.BadRequestError, match="9 tokens of 8") as raised:
            await client.chat.completions.create(model="any", messages=[QUESTION])
        assert raised.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="at most 3 turns") as raised:
            await client.chat.completions.create(model="any", messages=[QUESTION])
        assert raised.value.code == "max_turns_exceeded"
        with pytest.raises(openai.InternalServerError, match="interrupted"):
            await client.chat.completions.create(model="any", messages=[QUESTION], stream=True)


async def test_a_retry_of_the_sdk_after_a_failure_is_a_turn_of_its_own(tmp_path):
    async with served(tmp_path) as gateway, client_of(gateway, max_retries=2) as client:
        gateway.trainer.says = [Refused(0, 503, "not now"), "yes"]
        made = await client.chat.completions.create(model="any", messages=[QUESTION])
        assert made.choices[0].message.content == "yes" and len(gateway.trainer.asked) == 2


async def test_each_answer_tells_its_turn_s_id(tmp_path):
    async with served(tmp_path) as gateway, client_of(gateway) as client:
        told = await client.chat.completions.with_raw_response.create(
            model="any", messages=[QUESTION]
        )
        made = told.parse()
        assert made.id == told.headers["X-Turn-Id"] == f"turn-{SESSION}-0"
        parts = [
            part.id
            async for part in await client.chat.completions.create(
                model="any", messages=[QUESTION], stream=True
            )
        ]
        assert set(parts) == {f"turn-{SESSION}-1"}
        headers = {"Authorization": f"Bearer {KEY}"}
        url = gateway.url + "/inference/v1/generate"
        async with gateway.http.post(url, json={"token_ids": [1]}, headers=headers) as response:
            said = await response.json()
            assert said["request_id"] == response.headers["X-Turn-Id"] == f"turn-{SESSION}-2"
