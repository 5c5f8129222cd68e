"""Responses whose body is not what the route has to give."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from benchmarks.parts.hostile.behaviour import RESPONSES, endpoint
from benchmarks.parts.hostile.endpoint import Exchange, Json
from easyrl.inference_client.client import GENERATE

HTML = b"<!DOCTYPE html><html><body><h1>It works!</h1></body></html>"


async def _with_choice(exchange: Exchange, change: Callable[[Json, random.Random], object]) -> None:
    """A real response whose choice was changed."""
    answer = await exchange.forward()
    await exchange.answer(answer.changed(lambda tree: change(tree["choices"][0], exchange.rng)))


async def _with_bytes(exchange: Exchange, pattern: bytes, new: bytes) -> None:
    """A real response with the first match of ``pattern`` replaced."""
    answer = await exchange.forward()
    body, count = re.subn(pattern, lambda _: new, answer.body, count=1)
    assert count, f"{pattern!r} is not in {answer.body[:200]!r}"
    await exchange.answer(body)


def _set_token(choice: Json, rng: random.Random, token: object) -> None:
    at = rng.randrange(len(choice["token_ids"]))
    choice["token_ids"][at] = choice["logprobs"]["content"][at]["token_id"] = token


def _set_logprob(choice: Json, rng: random.Random, value: object) -> None:
    rng.choice(choice["logprobs"]["content"])["logprob"] = value


@endpoint("body", GENERATE, share=0.5)
async def invalid_utf8(exchange: Exchange) -> None:
    """A response with a byte that is not UTF-8 in a text field."""
    await _with_bytes(exchange, rb'"finish_reason":"', b'"finish_reason":"\xff')


@endpoint("body", GENERATE, share=0.5)
async def utf16(exchange: Exchange) -> None:
    """A response in UTF-16."""
    answer = await exchange.forward()
    await exchange.answer(answer.body.decode().encode("utf-16"))


@endpoint("body", GENERATE, share=0.5)
async def deep_nesting(exchange: Exchange) -> None:
    """A response with ten thousand nested lists in a field that nobody asked for."""
    answer = await exchange.forward()
    await exchange.answer(b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"," + answer.body[1:])


@endpoint("body", GENERATE, share=0.5)
async def nan_logprob(exchange: Exchange) -> None:
    """A log-probability that is the word NaN."""
    await _with_bytes(exchange, rb'"logprob":[-0-9.e]+', b'"logprob":NaN')


@endpoint("body", GENERATE, share=0.5)
async def infinite_logprob(exchange: Exchange) -> None:
    """A log-probability of -1e999, which becomes minus infinity."""
    await _with_bytes(exchange, rb'"logprob":[-0-9.e]+', b'"logprob":-1e999')


@endpoint("body", *RESPONSES, share=0.5)
async def positive_logprob(exchange: Exchange) -> None:
    """A log-probability above 0."""
    await _with_choice(exchange, lambda choice, rng: _set_logprob(choice, rng, 0.7))


@endpoint("body", GENERATE, share=0.5)
async def null_logprob(exchange: Exchange) -> None:
    """A log-probability of null."""
    await _with_choice(exchange, lambda choice, rng: _set_logprob(choice, rng, None))


@endpoint("body", *RESPONSES, share=0.5)
async def negative_token(exchange: Exchange) -> None:
    """A token id of -1."""
    await _with_choice(exchange, lambda choice, rng: _set_token(choice, rng, -1))


@endpoint("body", *RESPONSES, share=0.5)
async def token_outside_vocabulary(exchange: Exchange) -> None:
    """A token id that the policy has no embedding for."""
    await _with_choice(exchange, lambda choice, rng: _set_token(choice, rng, 123_456))


@endpoint("body", GENERATE, share=0.5)
async def token_beyond_64_bits(exchange: Exchange) -> None:
    """A token id of forty digits."""
    await _with_bytes(exchange, rb'"token_ids":\[\d+', b'"token_ids":[' + b"9" * 40)


@endpoint("body", GENERATE, share=0.5)
async def tokens_as_text(exchange: Exchange) -> None:
    """Token ids as strings."""

    def as_text(choice: Json, _: random.Random) -> None:
        choice["token_ids"] = [str(token) for token in choice["token_ids"]]

    await _with_choice(exchange, as_text)


@endpoint("body", *RESPONSES, share=0.5)
async def too_many_tokens(exchange: Exchange) -> None:
    """Twenty times as many tokens as were asked for, each with its log-probability and stamp."""

    def repeat(choice: Json, _: random.Random) -> None:
        choice["token_ids"] *= 20
        choice["logprobs"]["content"] *= 20
        choice["weight_versions"][-1]["end"] = len(choice["token_ids"])

    await _with_choice(exchange, repeat)


@endpoint("body", *RESPONSES, share=0.5)
async def no_tokens(exchange: Exchange) -> None:
    """A response without a token."""

    def empty(choice: Json, _: random.Random) -> None:
        choice |= {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []}

    await _with_choice(exchange, empty)


@endpoint("body", GENERATE, share=0.5)
async def no_choices(exchange: Exchange) -> None:
    """An empty list of choices."""
    answer = await exchange.forward()
    await exchange.answer(answer.changed(lambda tree: tree.update(choices=[])))


@endpoint("body", GENERATE, share=0.5)
async def choice_twice(exchange: Exchange) -> None:
    """The same choice twice, as indices 0 and 1."""
    answer = await exchange.forward()
    await exchange.answer(
        answer.changed(lambda tree: tree["choices"].append(tree["choices"][0] | {"index": 1}))
    )


@endpoint("body", GENERATE, share=0.5)
async def truncated_json(exchange: Exchange) -> None:
    """The first half of a response, with the length of that half."""
    answer = await exchange.forward()
    await exchange.answer(answer.body[: len(answer.body) // 2])


@endpoint("body", GENERATE, share=0.5)
async def two_documents(exchange: Exchange) -> None:
    """Two whole responses behind each other in one body."""
    answer = await exchange.forward()
    await exchange.answer(answer.body + b"\n" + answer.body)


@endpoint("body", share=0.5)
async def html(exchange: Exchange) -> None:
    """A web page with status 200, on every route."""
    await exchange.answer(HTML)


@endpoint("body", share=0.5)
async def empty_body(exchange: Exchange) -> None:
    """Status 200 and nothing behind it, on every route."""
    await exchange.answer(b"")


@endpoint("body", *RESPONSES, share=0.5)
async def fewer_logprobs(exchange: Exchange) -> None:
    """One log-probability less than tokens."""
    await _with_choice(exchange, lambda choice, _: choice["logprobs"]["content"].pop())


@endpoint("body", GENERATE, share=0.5)
async def logprobs_of_other_tokens(exchange: Exchange) -> None:
    """Log-probabilities that name other tokens than the response has."""

    def rename(choice: Json, _: random.Random) -> None:
        for entry in choice["logprobs"]["content"]:
            entry["token_id"] += 1

    await _with_choice(exchange, rename)


@endpoint("body", *RESPONSES, share=0.5)
async def other_prompt_length(exchange: Exchange) -> None:
    """A usage that counts one prompt token less: the prompt was cut."""

    def cut(tree: Json) -> None:
        tree["usage"]["prompt_tokens"] -= 1

    await exchange.answer((await exchange.forward()).changed(cut))


@endpoint("body", *RESPONSES, share=0.5)
async def aborted_response(exchange: Exchange) -> None:
    """A response that was given up half-way, as a finished one with the reason abort."""
    await _with_choice(exchange, lambda choice, _: choice.update(finish_reason="abort"))
