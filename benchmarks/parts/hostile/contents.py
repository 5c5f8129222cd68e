"""Well-formed responses that are not what the named weights said to the prompt, and their stamps.

What a response is made into here differs from the truth by nats, or in every stamp: a difference
below the limit of docs/endpoints.md (*Do both sides agree?*) is not told from rounding by anyone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from benchmarks.parts.hostile.behaviour import RESPONSES, NotNow, endpoint
from benchmarks.parts.hostile.endpoint import Answer, Exchange, Json, Request
from easyrl.inference_client.client import GENERATE

SWAP_WAIT_S = 1.0
SHIFT = 3.0  # nats


async def _with_spans(exchange: Exchange, spans: Callable[[str, int], object]) -> None:
    """A real response with other ``weight_versions``: of its version and number of tokens."""

    def stamp(tree: Json) -> None:
        choice = tree["choices"][0]
        version = choice["weight_versions"][0]["version"]
        choice["weight_versions"] = spans(version, len(choice["token_ids"]))

    await exchange.answer((await exchange.forward()).changed(stamp))


def _whole(version: object, end: int) -> list[Json]:
    return [{"version": version, "start": 0, "end": end}]


def _part(version: str, part: int, by: int) -> str:
    """``version`` with one of its parts, run:attempt:v, raised."""
    parts = version.split(":")
    if len(parts) != 3:
        raise NotNow
    parts[part] = str(int(parts[part]) + by)
    return ":".join(parts)


@endpoint("stamp", *RESPONSES, share=0.5)
async def stamp_of_the_next_batch(exchange: Exchange) -> None:
    """Tokens stamped with the version after the one that was asked for."""
    await _with_spans(exchange, lambda version, end: _whole(_part(version, 2, 1), end))


@endpoint("stamp", *RESPONSES, share=0.5)
async def stamp_of_another_attempt(exchange: Exchange) -> None:
    """Tokens stamped with the same version of the run's next attempt."""
    await _with_spans(exchange, lambda version, end: _whole(_part(version, 1, 1), end))


@endpoint("stamp", *RESPONSES, share=0.5)
async def stamp_of_another_run(exchange: Exchange) -> None:
    """Tokens stamped by another run that uses the same server."""
    await _with_spans(exchange, lambda version, end: _whole("other-" + version, end))


@endpoint("stamp", GENERATE, share=0.5)
async def no_stamp(exchange: Exchange) -> None:
    """Tokens without a stamp."""
    await _with_spans(exchange, lambda version, end: None)


@endpoint("stamp", *RESPONSES, share=0.5)
async def no_spans(exchange: Exchange) -> None:
    """An empty list of spans."""
    await _with_spans(exchange, lambda version, end: [])


@endpoint("stamp", *RESPONSES, share=0.5)
async def spans_with_a_gap(exchange: Exchange) -> None:
    """The last token is in no span."""
    await _with_spans(exchange, lambda version, end: _whole(version, end - 1))


@endpoint("stamp", *RESPONSES, share=0.5)
async def spans_that_overlap(exchange: Exchange) -> None:
    """Two spans over all tokens, the second of another version."""
    await _with_spans(
        exchange, lambda version, end: _whole(version, end) + _whole(_part(version, 2, -1), end)
    )


@endpoint("stamp", *RESPONSES, share=0.5)
async def half_of_the_old_version(exchange: Exchange) -> None:
    """The first half stamped with the version before: an update in mid-response."""

    def halves(version: str, end: int) -> list[Json]:
        old = {"version": _part(version, 2, -1), "start": 0, "end": end // 2}
        return [old, {"version": version, "start": end // 2, "end": end}]

    await _with_spans(exchange, halves)


@endpoint("stamp", *RESPONSES, share=0.5)
async def huge_stamp(exchange: Exchange) -> None:
    """A version of twenty thousand characters."""
    await _with_spans(exchange, lambda version, end: _whole(version * 1000, end))


@endpoint("stamp", "/weight_info", share=0.5)
async def version_denied(exchange: Exchange) -> None:
    """Another version than it was given, whenever it is asked; responses carry the right one."""
    await exchange.answer(b'{"weight_version": "somebody:0:7"}')


# ---- contents ------------------------------------------------------------------------------------


def _version(tree: Json) -> str:
    return tree["choices"][0]["weight_versions"][0]["version"]


def _responses(request: Request, answer: Answer) -> list[tuple[list[int], Json]]:
    """With their prompts; none of an answer that has not all."""
    try:
        trees = answer.trees
    except NotNow:
        return []
    has_tokens = all(tree["choices"][0]["weight_versions"] for tree in trees)
    return list(zip(request.prompts, trees, strict=True)) if has_tokens else []


def _exchanged(
    exchange: Exchange, own: Answer, fits: Callable[[list[int], list[int], Json], bool]
) -> Answer:
    """``own`` with the first earlier response that ``fits``: to its prompt, of another, as JSON.

    Of a stream each sample; ``NotNow`` if there is none for some.
    """
    earlier = [
        pair
        for path in RESPONSES
        for request, answer in exchange.endpoint.history.get(path, ())
        for pair in _responses(request, answer)
    ]

    def find(prompt: list[int]) -> Json:
        for other, tree in earlier:
            if len(other) == len(prompt) and fits(prompt, other, tree):
                return tree
        raise NotNow

    return own.with_trees([find(prompt) for prompt in exchange.request.prompts])


@endpoint("content", *RESPONSES, share=0.7, may_end_75=True)
async def answer_of_another_prompt(exchange: Exchange) -> None:
    """An earlier response to another prompt, of the right weights."""
    own = await exchange.forward()
    version = _version(own.trees[0])

    def fits(prompt: list[int], other: list[int], tree: Json) -> bool:
        return prompt != other and _version(tree) == version

    await exchange.answer(_exchanged(exchange, own, fits))


@endpoint("content", GENERATE, may_end_75=True)
async def answers_swapped(exchange: Exchange) -> None:
    """Two requests that wait at the same time get each other's response."""
    own = await exchange.forward()
    waiting = exchange.endpoint.waiting
    while waiting:
        other, theirs, future = waiting.popleft()
        is_other = other.json["token_ids"] != exchange.request.json["token_ids"]
        if is_other and not future.done():
            future.set_result(own)
            return await exchange.answer(theirs)
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    waiting.append((exchange.request, own, future))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWAP_WAIT_S):
            own = await future
    await exchange.answer(own)


@endpoint("content", *RESPONSES, share=0.7, may_end_75=True)
async def answer_of_old_weights(exchange: Exchange) -> None:
    """A response of an earlier batch's weights, stamped with the present version."""
    own = await exchange.forward()
    version = _version(own.trees[0])

    def fits(prompt: list[int], other: list[int], tree: Json) -> bool:
        return _version(tree) != version and ":" in _version(tree)

    def stamp(tree: Json) -> None:
        for span in tree["choices"][0]["weight_versions"]:
            span["version"] = version

    await exchange.answer(_exchanged(exchange, own, fits).changed(stamp))


@endpoint("content", *RESPONSES, share=0.7, may_end_75=True)
async def shifted_logprobs(exchange: Exchange) -> None:
    """Every log-probability too low by three nats."""

    def shift(tree: Json) -> None:
        for entry in tree["choices"][0]["logprobs"]["content"]:
            entry["logprob"] -= SHIFT

    await exchange.answer((await exchange.forward()).changed(shift))


@endpoint("content", *RESPONSES, share=0.7, may_end_75=True)
async def certain_logprobs(exchange: Exchange) -> None:
    """Every log-probability 0, as a server that returns them before sampling might."""

    def certain(tree: Json) -> None:
        for entry in tree["choices"][0]["logprobs"]["content"]:
            entry["logprob"] = 0.0

    await exchange.answer((await exchange.forward()).changed(certain))


@endpoint("content", *RESPONSES, share=0.7, may_end_75=True)
async def reversed_tokens(exchange: Exchange) -> None:
    """The tokens in reverse order, with their log-probabilities."""

    def reverse(tree: Json) -> None:
        choice = tree["choices"][0]
        choice["token_ids"].reverse()
        choice["logprobs"]["content"].reverse()

    await exchange.answer((await exchange.forward()).changed(reverse))


@endpoint("content", *RESPONSES, share=0.7, may_end_75=True)
async def random_tokens(exchange: Exchange) -> None:
    """Tokens drawn at random, with the log-probabilities of those that the model drew."""

    def draw(tree: Json) -> None:
        choice = tree["choices"][0]
        choice["token_ids"] = exchange.rng.choices(range(4, 14), k=len(choice["token_ids"]))
        for entry, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
            entry["token_id"] = token

    await exchange.answer((await exchange.forward()).changed(draw))


def _cut(finish_reason: str) -> Callable[[Json], None]:
    """Leaves the first half of a response, which then has another end."""

    def change(tree: Json) -> None:
        choice = tree["choices"][0]
        half = len(choice["token_ids"]) // 2
        if not half:
            raise NotNow
        del choice["token_ids"][half:], choice["logprobs"]["content"][half:]
        choice["weight_versions"] = _whole(choice["weight_versions"][0]["version"], half)
        choice["finish_reason"] = finish_reason

    return change


@endpoint("content", *RESPONSES, share=0.7)
async def cut_and_called_whole(exchange: Exchange) -> None:
    """The first half of a response, said to end there by itself."""
    await exchange.answer((await exchange.forward()).changed(_cut("stop")))


@endpoint("content", *RESPONSES, share=0.7)
async def cut_and_called_long(exchange: Exchange) -> None:
    """The first half of a response, said to be as long as was asked for."""
    await exchange.answer((await exchange.forward()).changed(_cut("length")))
