"""Server-sent events of a finished turn, with comments that keep the connection while it is made.

The events come from the record, all at once: a stamp comes only with a turn's last token, and
nothing is told before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson
from aiohttp import web

from easyrl.gateway.errors import GatewayError

T = TypeVar("T")

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
KEEP_ALIVE, DONE = b": keep-alive\n\n", b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def stream(
    http: web.Request,
    turn: asyncio.Future[T],
    events: Callable[[T], Sequence[Any]],
    keep_alive_s: float,
) -> web.StreamResponse:
    """Answers with ``events`` of what ``turn`` gives.

    What fails before the first comment raises ``GatewayError``, with its status; later it is an
    event. Returns when the turn has ended, also if the client leaves before.
    """
    response = web.StreamResponse(headers=HEADERS)
    await asyncio.wait([turn], timeout=keep_alive_s)
    if turn.done():
        turn.result()  # raises
    is_there = await _reaches(response.prepare(http))
    while not turn.done():
        if is_there:
            is_there = await _reaches(response.write(KEEP_ALIVE))
        await asyncio.wait([turn], timeout=keep_alive_s)
    try:
        content = b"".join(map(event, events(turn.result())))
    except GatewayError as error:
        content = event(error.as_json())
    if is_there:
        await _reaches(response.write(content + DONE))
        await _reaches(response.write_eof())
    return response


async def _reaches(writing: Any) -> bool:
    """Whether the client is still there."""
    try:
        await writing
    except ConnectionError:
        return False
    return True
