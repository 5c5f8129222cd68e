"""Answers that are not HTTP, or more of it than a client should take."""

from __future__ import annotations

import asyncio
import gzip
import time
from functools import cache

from benchmarks.parts.hostile.behaviour import RESPONSES, endpoint
from benchmarks.parts.hostile.endpoint import Exchange, http

OK = b"HTTP/1.1 200 OK\r\n"


@cache
def _bomb() -> bytes:
    """256 MB, packed twice, which takes a second: not where the catalogue is only listed."""
    return gzip.compress(gzip.compress(b" " * 2**28, 1), 9)


@endpoint("protocol", share=0.5)
async def gzip_bomb(exchange: Exchange) -> None:
    """A compressed body of 256 MB, on every route."""
    bomb = await asyncio.to_thread(_bomb)
    await exchange.send(http(bomb, "200 OK", "Content-Encoding: gzip, gzip"))


@endpoint("protocol", share=0.5)
async def redirect_to_itself(exchange: Exchange) -> None:
    """A redirect to the address that was asked, on every route."""
    url = exchange.endpoint.url + exchange.request.target
    await exchange.answer(b"", "307 Temporary Redirect", f"Location: {url}")


@endpoint("protocol", share=0.5)
async def redirect_elsewhere(exchange: Exchange) -> None:
    """A redirect to a server that the run was never told of, on every route."""
    url = exchange.endpoint.elsewhere + exchange.request.target
    await exchange.answer(b"", "308 Permanent Redirect", f"Location: {url}")


@endpoint("protocol", share=0.5)
async def endless_headers(exchange: Exchange) -> None:
    """Headers without end, on every route."""
    await exchange.send(OK)
    await exchange.send_for_ever(b"X-More: " + b"a" * 4000 + b"\r\n")


@endpoint("protocol", share=0.5)
async def endless_interim_answers(exchange: Exchange) -> None:
    """100 Continue again and again, on every route."""
    await exchange.send_for_ever(b"HTTP/1.1 100 Continue\r\n\r\n" * 100, pause_s=0.01)


@endpoint("protocol", share=0.5)
async def endless_body(exchange: Exchange) -> None:
    """A chunked body without end, on every route."""
    await exchange.send(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    await exchange.send_for_ever(b"10000\r\n" + b" " * 2**16 + b"\r\n")


@endpoint("protocol", *RESPONSES, share=0.5)
async def slow_drip(exchange: Exchange) -> None:
    """A response of which a byte comes now and then."""
    await exchange.send(OK + b"Content-Length: 1000000\r\n\r\n")
    await exchange.send_for_ever(b" ", pause_s=0.1)


@endpoint("protocol", *RESPONSES, share=0.5)
async def reset_in_body(exchange: Exchange) -> None:
    """The connection is reset in the middle of a response."""
    whole = http((await exchange.forward()).body)
    await exchange.send(whole[: len(whole) // 2])
    exchange.reset()


@endpoint("protocol", share=0.5)
async def reset_at_once(exchange: Exchange) -> None:
    """The connection is reset instead of an answer, on every route."""
    exchange.reset()


@endpoint("protocol", *RESPONSES, share=0.5)
async def length_too_big(exchange: Exchange) -> None:
    """A Content-Length beyond the response, and then the end of the connection."""
    body = (await exchange.forward()).body
    await exchange.send(OK + b"Content-Length: %d\r\n\r\n" % (len(body) + 100) + body)


@endpoint("protocol", *RESPONSES, share=0.5)
async def length_too_small(exchange: Exchange) -> None:
    """A Content-Length short of the response; the rest comes behind it."""
    body = (await exchange.forward()).body
    await exchange.send(OK + b"Content-Length: %d\r\n\r\n" % (len(body) - 100) + body)


@endpoint("protocol", share=0.5)
async def negative_length(exchange: Exchange) -> None:
    """A Content-Length of -1, on every route."""
    await exchange.send(OK + b"Content-Length: -1\r\n\r\n{}")


@endpoint("protocol", *RESPONSES, share=0.5)
async def broken_chunks(exchange: Exchange) -> None:
    """Chunks whose sizes are no numbers."""
    body = (await exchange.forward()).body
    await exchange.send(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body + b"\r\n0\r\n\r\n")


@endpoint("protocol", *RESPONSES, share=0.5)
async def both_lengths(exchange: Exchange) -> None:
    """Content-Length and chunks at once, which disagree (response smuggling)."""
    body = (await exchange.forward()).body
    head = b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    await exchange.send(OK + head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")


@endpoint("protocol", share=0.5)
async def no_head(exchange: Exchange) -> None:
    """A body without status or headers (HTTP/0.9), on every route."""
    await exchange.send(b'{"choices": []}\r\n')


@endpoint("protocol", share=0.3)
async def never_answered(exchange: Exchange) -> None:
    """A connection that is accepted, and then nothing, on every route."""
    await exchange.hold()


@endpoint("protocol", *RESPONSES)
async def generate_never_answered(exchange: Exchange) -> None:
    """Health and weights as they should be; no request for responses is ever answered."""
    await exchange.hold()


@endpoint("protocol", *RESPONSES, "/metrics")
async def tokens_counted_never_answered(exchange: Exchange) -> None:
    """Token counters that grow all the time; no request for responses is ever answered."""
    if exchange.request.path in RESPONSES:
        await exchange.hold()
    else:
        count = int(1000 * time.monotonic())
        await exchange.answer(b'vllm:generation_tokens_total{engine="0"} %d\n' % count)


@endpoint("protocol", share=0.5)
async def tls_hello(exchange: Exchange) -> None:
    """The beginning of a TLS handshake, on every route."""
    await exchange.send(
        b"\x16\x03\x03\x00\x7a\x02\x00\x00\x76\x03\x03" + exchange.rng.randbytes(64)
    )


@endpoint("protocol", share=0.5)
async def random_bytes(exchange: Exchange) -> None:
    """Two kilobytes of noise, on every route."""
    await exchange.send(exchange.rng.randbytes(2048))


@endpoint("protocol", *RESPONSES, share=0.5)
async def second_answer_behind(exchange: Exchange) -> None:
    """Behind a response another prompt's, left in the connection for the next request."""
    other = next(
        (
            answer
            for request, answer in exchange.endpoint.history.get(exchange.request.path, ())
            if request.prompts != exchange.request.prompts
        ),
        None,
    )
    own = await exchange.forward()
    answers = [own] if other is None else [own, other]
    for answer in answers:
        head = b"Content-Type: %s\r\nContent-Length: %d\r\n\r\n"
        head %= (answer.content_type.encode(), len(answer.body))
        await exchange.send(OK + head + answer.body)
    await asyncio.sleep(0.3)  # the connection stays open: it may be used again


@endpoint("protocol", share=0.5)
async def switching_protocols(exchange: Exchange) -> None:
    """101 Switching Protocols, on every route."""
    await exchange.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n")


@endpoint("protocol", share=0.5)
async def no_content(exchange: Exchange) -> None:
    """204 No Content, on every route."""
    await exchange.send(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")


@endpoint("protocol", share=0.5)
async def escape_sequences(exchange: Exchange) -> None:
    """A 500 whose reason and text would repaint a terminal, on every route."""
    text = b"\x1b[2J\x1b]0;owned\x07" * 200
    await exchange.send(http(text, "500 \x1b[31mred\x1b[0m"))


@endpoint("protocol", share=0.5)
async def many_cookies(exchange: Exchange) -> None:
    """A hundred cookies with every answer, for a parent domain."""
    answer = await exchange.forward()
    cookies = [f"Set-Cookie: c{n}=x; Domain=0.0.1; Path=/" for n in range(100)]
    await exchange.answer(answer, "200 OK", *cookies)
