"""A scripted server for ``benchmarks.gateway``: vLLM's routes, answered from bytes made beforehand.

Whoever comes directly asks the same two routes as an environment asks the gateway.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from benchmarks.parts.gateway.load import Variant, read_variants
from benchmarks.parts.producer.load import VERSION
from benchmarks.parts.producer.server import Connection, Response, response_of, seed_of

NOT_FOUND = Response(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", 0, 0.0)
PLACE = b"999999999"  # of a prompt's length


def serve(connection: socket.socket) -> None:
    """Is told the file of its answers, tells its port, and serves until the other end is closed."""
    asyncio.run(_serve(read_variants(Path(connection.recv(2**12).decode())), connection))


async def _serve(variants: Sequence[Variant], connection: socket.socket) -> None:
    loop, script = asyncio.get_running_loop(), Script(variants)
    server = await loop.create_server(lambda: Connection(script), "127.0.0.1", 0, backlog=4096)
    connection.sendall(str(server.sockets[0].getsockname()[1]).encode())
    connection.setblocking(False)
    await loop.sock_recv(connection, 1)


class Script:
    """What is answered."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._made = {
            path: [
                response_of(orjson.dumps(make(v)), len(v.token_ids), v.delay_s) for v in variants
            ]
            for path, make in (
                (b"/inference/v1/generate", _generate),
                (b"/v1/chat/completions", _chat),
            )
        }
        models = {"data": [{"id": "scripted", "max_model_len": None}]}
        self._others = {
            b"/health": response_of(b"", 0),
            b"/v1/models": response_of(orjson.dumps(models), 0),
            b"/weight_info": response_of(orjson.dumps({"weight_version": VERSION}), 0),
        }

    def answer(self, path: bytes, body: bytes) -> Response:
        made = self._made.get(path)
        if made is None:
            return self._others.get(path, NOT_FOUND)
        response = made[seed_of(body) % len(made)]
        return replace(response, content=_counted(response.content, body))


def _counted(content: bytes, body: bytes) -> bytes:
    """``content`` with the number of token ids in ``body``, which is checked, in as many bytes."""
    begin = body.find(b'"token_ids":')
    number = body.count(b",", begin, body.find(b"]", begin)) + 1 if begin >= 0 else 0
    return content.replace(PLACE, b"%*d" % (len(PLACE), number), 1)


def _generate(variant: Variant) -> dict:
    pairs = zip(variant.token_ids, variant.logprobs, strict=True)
    said = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in pairs]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": variant.token_ids,
        "weight_versions": [_stamp(variant)],
        "logprobs": {"content": [{**each, "top_logprobs": [each]} for each in said]},
    }
    return {"model": "scripted", "usage": _usage(variant), "choices": [choice]}


def _chat(variant: Variant) -> dict:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": [], "top_logprobs": []}
        for token, logprob in zip(variant.token_ids, variant.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": variant.text},
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [_stamp(variant)],
    }
    return {"model": "scripted", "usage": _usage(variant), "choices": [choice]}


def _stamp(variant: Variant) -> dict[str, object]:
    return {"version": VERSION, "start": 0, "end": len(variant.token_ids)}


def _usage(variant: Variant) -> dict[str, int]:
    sampled = len(variant.token_ids)
    return {"prompt_tokens": int(PLACE), "completion_tokens": sampled}
