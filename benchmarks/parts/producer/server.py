"""A scripted inference server: vLLM's routes, answered from bytes made beforehand.

It stands in for endpoints that are somewhere else, so that it has to be cheap: no framework, a
search for the seed instead of JSON, one write per response.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import orjson

from benchmarks.parts.producer.load import VERSION, VOCABULARY, Load

NUM_VARIANTS = 64
SEED = b'"seed":'
CONTENT_LENGTH = b"content-length:"


@dataclass(frozen=True)
class Response:
    content: bytes  # with its HTTP header
    num_tokens: int
    delay_s: float  # from the request to it


def serve(connection: socket.socket) -> None:
    """Is told the load, tells its port, then how many tokens it has served whenever asked."""
    load = Load(**msgspec.json.decode(connection.recv(2**16)[4:]))
    asyncio.run(_serve(load, connection))


async def _serve(load: Load, connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    script = Script(load)
    server = await loop.create_server(lambda: Connection(script), "127.0.0.1", 0, backlog=4096)
    connection.sendall(str(server.sockets[0].getsockname()[1]).encode())
    connection.setblocking(False)
    while await loop.sock_recv(connection, 1):
        await loop.sock_sendall(connection, str(script.num_tokens_served).encode())


class Script:
    """What is answered."""

    def __init__(self, load: Load) -> None:
        self.num_tokens_served = 0
        s_per_token = load.latency_s / load.num_tokens
        variants = [_Variant.draw(load, number) for number in range(NUM_VARIANTS)]
        self.generated = {
            path: [response_of(make(v), n := len(v.token_ids), n * s_per_token) for v in variants]
            for path, make in (
                (b"/inference/v1/generate", _Variant.generate),
                (b"/v1/completions", _Variant.completions),
            )
        }
        models = {"data": [{"id": "scripted", "max_model_len": None}]}
        self.others = {
            b"/health": response_of(b"", 0),
            b"/v1/models": response_of(orjson.dumps(models), 0),
            b"/weight_info": response_of(orjson.dumps({"weight_version": VERSION}), 0),
        }

    def answer(self, path: bytes, body: bytes) -> Response:
        variants = self.generated.get(path)
        if variants is None:
            return self.others[path]
        response = variants[seed_of(body) % NUM_VARIANTS]
        self.num_tokens_served += response.num_tokens
        return response


def seed_of(body: bytes) -> int:
    """A request's, without reading its JSON."""
    begin = body.index(SEED) + len(SEED)
    digits = body[begin : begin + 12].lstrip()
    end = next(i for i in range(len(digits)) if not digits[i : i + 1].isdigit())
    return int(digits[:end])


@dataclass(frozen=True)
class _Variant:
    token_ids: list[int]
    logprobs: list[float]
    prompt_token_ids: list[int]

    @classmethod
    def draw(cls, load: Load, number: int) -> _Variant:
        rng = np.random.default_rng(number)
        num_tokens = max(1, round(load.num_tokens * (0.5 + (number + 0.5) / NUM_VARIANTS)))
        return cls(
            token_ids=rng.integers(0, VOCABULARY, num_tokens).tolist(),
            logprobs=(-rng.exponential(size=num_tokens)).tolist(),
            prompt_token_ids=rng.integers(0, VOCABULARY, load.num_prompt_tokens).tolist(),
        )

    def generate(self) -> bytes:
        content = [
            {
                "token_id": token,
                "logprob": logprob,
                "rank": 1,
                "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": 1}],
            }
            for token, logprob in zip(self.token_ids, self.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": self.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": VERSION, "start": 0, "end": len(self.token_ids)}],
            "logprobs": {"content": content},
        }
        return orjson.dumps(
            {
                "request_id": "generate-tokens-0",
                "model": "scripted",
                "created": 0,
                "usage": self._usage(),
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "output_mode": "tokens",
                "choices": [choice],
            }
        )

    def completions(self) -> bytes:
        words = [f" w{token}" for token in self.token_ids]
        offsets = np.cumsum([0, *map(len, words[:-1])]).tolist()
        choice = {
            "index": 0,
            "text": "".join(words),
            "logprobs": {
                "text_offset": offsets,
                "token_logprobs": self.logprobs,
                "tokens": words,
                "top_logprobs": [
                    {word: logprob} for word, logprob in zip(words, self.logprobs, strict=True)
                ],
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": self.token_ids,
            "prompt_logprobs": None,
            "prompt_token_ids": self.prompt_token_ids,
            "routed_experts": None,
        }
        return orjson.dumps(
            {
                "id": "cmpl-0",
                "object": "text_completion",
                "created": 0,
                "model": "scripted",
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": self._usage(),
                "kv_transfer_params": None,
            }
        )

    def _usage(self) -> dict[str, int]:
        prompt, response = len(self.prompt_token_ids), len(self.token_ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + response,
            "completion_tokens": response,
        }


class Answers(Protocol):
    """What a connection answers with."""

    def answer(self, path: bytes, body: bytes) -> Response: ...


def response_of(body: bytes, num_tokens: int, delay_s: float = 0.0) -> Response:
    """``body`` behind an HTTP header."""
    header = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return Response(header.encode() + body, num_tokens, delay_s)


class Connection(asyncio.Protocol):
    """One client's; answers one request after the other."""

    def __init__(self, script: Answers) -> None:
        self._script = script
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._received[:head_end])
        length = _content_length(head)
        body_begin = head_end + 4
        if len(self._received) < body_begin + length:
            return
        body = bytes(self._received[body_begin : body_begin + length])
        del self._received[: body_begin + length]
        response = self._script.answer(head.split(b" ", 2)[1], body)
        asyncio.get_running_loop().call_later(response.delay_s, self._answer, response.content)

    def _answer(self, content: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(content)


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    begin = lowered.find(CONTENT_LENGTH)
    if begin < 0:
        return 0
    return int(lowered[begin + len(CONTENT_LENGTH) :].split(b"\r\n", 1)[0])
