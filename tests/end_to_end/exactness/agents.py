"""Agents that do to a conversation what agents do, each as a coroutine of a run's environment.

A record's field ``behaviour`` says which one plays it. Loaded by the run's host processes as a
file of a user's; imported by the tests for its names alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import openai
from tokenizers import Tokenizer

from easyrl.environments.client import Client

Behaviour = Literal[
    "retokenised",
    "compacted",
    "reasoned",
    "as_template",
    "tools",
    "sub_agent",
    "forked",
    "retried",
    "hung_up",
    "streamed",
    "stopped",
]
Message = dict[str, Any]
Said = dict[str, float]  # metrics

NEXT, MORE = "and then?", "go on"
SHORT = 12  # tokens of an answer that was not learnt
PATIENCE_S = 1.0  # of the client that hangs up; the proxy holds replies for longer
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def ask(client: openai.AsyncOpenAI, messages: Sequence[Message], **more: Any) -> Message:
    """The assistant's message."""
    made = await client.chat.completions.create(model="policy", messages=list(messages), **more)
    return made.choices[0].message.model_dump(exclude_none=True)


async def compacted(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """The middle of a history is replaced, and the agent goes on behind that."""
    question = user(prompt.text)
    first = await ask(client, [question], max_tokens=SHORT)
    second = await ask(client, [question, first, user(NEXT)], max_tokens=SHORT)
    left_out = {"role": "assistant", "content": "(left out)"}
    short = [question, left_out, user(NEXT), second, user(MORE)]
    third = await ask(client, short, max_tokens=SHORT)
    await ask(client, [*short, third, user(MORE)], max_tokens=SHORT)
    return {}


async def reasoned(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """Turns behind one whose reasoning the template strips."""
    question = user(prompt.text)
    first = await ask(client, [question])
    second = await ask(client, [question, first, user(NEXT)], max_tokens=SHORT + 4)
    chat = [question, first, user(NEXT), second, user(MORE)]
    await ask(client, chat, max_tokens=SHORT)
    return {"reasoned": float("</think>" in first["content"])}


async def tools(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """Two tools are called at once, and answered in the other order."""
    question = user(prompt.text)
    first = await ask(client, [question], tools=[ADD])
    calls = first["tool_calls"]
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}
        for call in reversed(calls)
    ]
    await ask(client, [question, first, *answers], tools=[ADD], max_tokens=SHORT)
    return {"calls": float(len(calls))}


async def sub_agent(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """Another conversation in the middle of one, both going on at the same time."""
    question = user(prompt.text)
    system = {"role": "system", "content": "You look things up."}

    async def two_turns(*messages: Message) -> None:
        first = await ask(client, messages, max_tokens=SHORT)
        await ask(client, [*messages, first, user(NEXT)], max_tokens=SHORT)

    first = await ask(client, [question], max_tokens=SHORT)
    await asyncio.gather(
        two_turns(system, question), two_turns(question, first, user("the other one said so"))
    )
    return {}


async def forked(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """Two ways to go on behind one answer."""
    question = user(prompt.text)
    first = await ask(client, [question], max_tokens=SHORT)
    for text in (NEXT, MORE):
        await ask(client, [question, first, user(text)], max_tokens=SHORT)
    return {}


async def retried(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """The SDK asks again where the reply was lost: without an id, and with one."""
    question = user(prompt.text)
    import httpx2

    class LosesReplies(httpx2.AsyncHTTPTransport):
        """The first one, when the server has sent all of it."""

        num_lost = 0

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            response = await super().handle_async_request(request)
            if self.num_lost == 0:
                self.num_lost += 1
                await response.aread()
                await response.aclose()
                raise httpx2.ReadError("the reply is lost", request=request)
            return response

    async def ask_twice(messages: Sequence[Message], **more: Any) -> Message:
        transport = LosesReplies()
        http = openai.DefaultAsyncHttpxClient(transport=transport)
        async with client.with_options(http_client=http, max_retries=2) as own:
            said = await ask(own, messages, max_tokens=SHORT, **more)
        assert transport.num_lost == 1
        return said

    first = await ask_twice([question])
    again = [question, first, user(NEXT)]
    await ask_twice(again, extra_headers={"X-Request-Id": "the second turn"})
    return {}


async def hung_up(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """The client leaves: while a turn is sampled, in the middle of a stream, and for good."""
    question = user(prompt.text)
    num_left = 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ask(client, [question], max_tokens=SHORT)
    except TimeoutError:
        num_left += 1
    stream = await client.chat.completions.create(
        model="policy", messages=[question, user(NEXT)], max_tokens=SHORT, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await ask(client, [question], max_tokens=SHORT)
    last = asyncio.create_task(ask(client, [question, user(MORE)], max_tokens=SHORT))
    await asyncio.sleep(PATIENCE_S)
    num_left += last.cancel()
    return {"left": float(num_left)}


async def streamed(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """Server-sent events put together are the answer, which is then continued."""
    question = user(prompt.text)
    stream = await client.chat.completions.create(
        model="policy",
        messages=[question],
        max_tokens=SHORT,
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    content, logprobs, token_ids, usage = "", [], [], 0
    async for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage.completion_tokens
        for choice in chunk.choices:
            content += choice.delta.content or ""
            logprobs += [] if choice.logprobs is None else choice.logprobs.content or []
            token_ids += (choice.model_extra or {}).get("token_ids") or []
    assert len(logprobs) == len(token_ids) == usage > 0
    first = {"role": "assistant", "content": content}
    await ask(client, [question, first, user(NEXT)], max_tokens=SHORT)
    # what the client was told, for whoever has the endpoint's log
    said = {f"id/{place}": float(token) for place, token in enumerate(token_ids)}
    return said | {f"logprob/{n}": float(token.logprob) for n, token in enumerate(logprobs)}


async def stopped(client: openai.AsyncOpenAI, prompt: Any) -> Said:
    """A turn that a stop string ends, where endpoints can; and one that a stop token ends."""
    question = user(prompt.text)
    refused = 0.0
    try:
        first = await ask(client, [question], stop=["ner i"])
    except openai.BadRequestError as error:
        assert "stop_token_ids" in error.message
        refused = 1.0
        first = await ask(client, [question])
    tokenizer = Tokenizer.from_file(prompt.metadata["tokenizer"])
    space = {"stop_token_ids": tokenizer.encode(" ", add_special_tokens=False).ids}
    chat = [question, first, user(NEXT)]
    second = await ask(client, chat, max_tokens=SHORT, extra_body=space)
    await ask(client, [*chat, second, user(MORE)], max_tokens=SHORT)
    cut = float(first["content"] == "the win")
    return {"refused": refused, "cut": cut}


BEHAVIOURS: dict[str, Callable[[openai.AsyncOpenAI, Any], Awaitable[Said]]] = {
    "compacted": compacted,
    "reasoned": reasoned,
    "as_template": reasoned,
    "tools": tools,
    "sub_agent": sub_agent,
    "forked": forked,
    "retried": retried,
    "hung_up": hung_up,
    "streamed": streamed,
    "stopped": stopped,
}


async def rollout(client: openai.AsyncOpenAI, prompt: Any) -> dict[str, Any]:
    """The behaviour that the record names."""
    said = await BEHAVIOURS[prompt.metadata["behaviour"]](client, prompt)
    return {"reward": reward_of(prompt), "components": said}


async def retokenised(client: Client, prompt: Any) -> dict[str, Any]:
    """Histories by their texts, unchanged and changed, and by ids that the agent has made of
    them."""
    tokenizer = Tokenizer.from_file(prompt.metadata["tokenizer"])

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    question = user(prompt.text)
    begin = f"<|im_start|>user\n{prompt.text}<|im_end|>\n<|im_start|>assistant\n"
    behind = f"<|im_end|>\n<|im_start|>user\n{NEXT}<|im_end|>\n<|im_start|>assistant\n"
    first = await client.chat([question])
    await client.chat([question, first.message, user(NEXT)], max_tokens=SHORT)
    changed = {**first.message, "content": first.text + " "}
    await client.chat([question, changed, user(NEXT)], max_tokens=SHORT)
    await client.generate(ids_of(begin + first.text + behind), max_tokens=SHORT)
    # the same by ids: those that were sampled, and others that read the same
    made = await client.generate(ids_of(begin))
    text = tokenizer.decode(made.token_ids)
    await client.generate([*ids_of(begin), *made.token_ids, *ids_of("\n")], max_tokens=SHORT)
    await client.generate(ids_of(f"{begin}{text}{behind}"), max_tokens=SHORT)
    return {"reward": reward_of(prompt), "components": {}}


def reward_of(prompt: Any) -> float:
    """Another one for each sample, so that all have an advantage."""
    return (prompt.seed % 1009) / 1009
