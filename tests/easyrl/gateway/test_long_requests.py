"""Requests that would cost the gateway its memory, or its time: refused, or one after another."""

from __future__ import annotations

import asyncio

import pytest

from easyrl.gateway.errors import BadRequest, GatewayError
from easyrl.gateway.long_requests import LongRequests
from easyrl.gateway.messages import Settings
from easyrl.gateway.process import within
from easyrl.gateway.rendering import Renderer
from easyrl.gateway.requests import MAX_MESSAGES
from easyrl.gateway.server import LONG_BODY_BYTES
from tests.easyrl.gateway.gateway_parts import chat_tokenizer, served, until, user

GIB = 2**30


async def test_long_requests_wait_for_their_memory_in_order():
    room, began, gate = LongRequests(10, 1000), [], asyncio.Event()

    async def works(number: int, num_bytes: int) -> None:
        async with room.place(num_bytes):
            began.append(number)
            await gate.wait()

    sizes = [4, 6, 1, 30, 2]
    tasks = [asyncio.create_task(works(n, size)) for n, size in enumerate(sizes)]
    await asyncio.sleep(0.01)
    assert began == [0, 1]  # ten bytes; the small one does not overtake
    gate.set()
    await asyncio.gather(*tasks)
    assert began == [0, 1, 2, 3, 4]  # one that is longer than all room is by itself


async def test_too_many_that_wait_are_refused_and_who_leaves_makes_room():
    room, gate = LongRequests(10, 20), asyncio.Event()

    async def works(num_bytes: int) -> None:
        async with room.place(num_bytes):
            await gate.wait()

    first = asyncio.create_task(works(10))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(works(10)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(GatewayError) as caught:
        await works(10)
    assert caught.value.status == 429
    waiting[0].cancel()
    await asyncio.sleep(0.01)
    late = asyncio.create_task(works(10))
    await asyncio.sleep(0.01)
    gate.set()
    await asyncio.gather(first, waiting[1], late)
    async with room.place(10):
        pass


def test_bodies_are_bounded_by_the_memory_that_there_is():
    settings = Settings("folder")
    assert within(settings, None) == settings
    small = within(settings, GIB)
    assert small.max_body_bytes * 220 * 2 <= GIB and small.max_body_bytes > 2**21
    assert small.max_long_bytes == GIB // 8
    assert within(settings, 64 * GIB).max_body_bytes == settings.max_body_bytes


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised():
    renderer = Renderer(chat_tokenizer(), max_context=100)
    longest = max(len(token.encode()) for token in renderer.tokenizer.get_vocab())
    assert len(renderer.ids("the " * 30)) > 0
    with pytest.raises(BadRequest, match="maximum context length is 100 tokens") as caught:
        renderer.ids("é" * (100 * longest // 2 + 1))
    assert caught.value.code == "context_length_exceeded"
    assert len(Renderer(chat_tokenizer()).ids("a" * 10_000)) > 0  # nobody says what fits


async def test_a_chat_of_too_many_messages_is_refused(tmp_path):
    async with served(tmp_path) as gateway:
        status, said = await gateway.post({"messages": [user("")] * (MAX_MESSAGES + 1)})
        assert status == 400 and f"at most {MAX_MESSAGES}" in said["error"]["message"]
        assert not gateway.trainer.asked


async def test_the_trainer_is_told_of_a_long_request_while_it_is_worked_on(tmp_path):
    async with served(tmp_path) as gateway:
        await gateway.post({"messages": [user("a")]})
        assert gateway.trainer.working == []
        await gateway.post({"messages": [user("a " * LONG_BODY_BYTES)]})
        session = gateway.trainer.asked[-1].session
        told = [(each.session, each.goes_on) for each in gateway.trainer.working]
        assert told == [(session, True), (session, False)] * 3  # read, parsed, and rendered
        await until(lambda: len(gateway.trainer.asked) == 2)
