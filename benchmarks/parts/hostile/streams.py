"""Streams of samples that are no streams, not these samples, or without an end.

Of endpoints that say that they stream (``inference_client/sample_stream.py``). What a sample's
contents, stamps and statuses may be else, is in the other files: there both routes are met.
"""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.parts.hostile.behaviour import NotNow, endpoint
from benchmarks.parts.hostile.endpoint import STREAM, Answer, Exchange, http
from benchmarks.parts.hostile.samples import body_of, samples_of
from benchmarks.parts.hostile.statuses import PROMPT_TOKENS, key_of
from easyrl.inference_client.client import ABORT
from easyrl.inference_client.sample_stream import (
    LOGPROBS,
    SAMPLES,
    Ended,
    Refused,
    Sampled,
    frame_of,
)
from easyrl.runtime.frames import HEADER_BYTES, frame

BEGIN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DRIP_S = 0.1
_encode = msgspec.msgpack.encode


async def _samples(exchange: Exchange) -> list[Sampled]:
    """What the server behind has sampled."""
    return samples_of((await exchange.forward()).body)


async def _with_samples(
    exchange: Exchange, change: Callable[[list[Sampled], random.Random], Sequence[Ended]]
) -> None:
    """A real stream of which samples were changed."""
    samples = change(await _samples(exchange), exchange.rng)
    await exchange.answer(Answer(200, body_of(samples), STREAM))


async def _with_last(exchange: Exchange, payload: Callable[[Sampled], bytes]) -> None:
    """A real stream with other bytes as its last frame."""
    *samples, last = await _samples(exchange)
    await exchange.answer(body_of(samples) + frame(payload(last)))


async def _begin(exchange: Exchange, content: bytes = b"") -> None:
    """A stream that has begun with ``content``, and goes on."""
    await exchange.send(BEGIN + (_chunk(content) if content else b""))


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def _with(sample: Sampled, **changes: Any) -> Sampled:
    return msgspec.structs.replace(sample, **changes)


# ---- frames --------------------------------------------------------------------------------------


@endpoint("stream", SAMPLES)
async def frame_cut(exchange: Exchange) -> None:
    """A stream that ends, as HTTP has it, in the middle of a frame."""
    body = body_of(await _samples(exchange))
    await _begin(exchange, body[: len(body) // 2])
    await exchange.send(END)


@endpoint("stream", SAMPLES)
async def frame_length_huge(exchange: Exchange) -> None:
    """A frame of 4,294,967,295 bytes, -1 to whom the length has a sign."""
    await exchange.answer(b"\xff\xff\xff\xff" + body_of(await _samples(exchange)))


@endpoint("stream", SAMPLES)
async def frame_length_zero(exchange: Exchange) -> None:
    """A frame of no bytes between two samples."""
    first, *samples = await _samples(exchange)
    await exchange.answer(body_of([first]) + bytes(HEADER_BYTES) + body_of(samples))


@endpoint("stream", SAMPLES)
async def frame_length_short(exchange: Exchange) -> None:
    """A length five bytes below the frame's, whose rest is taken for the next one."""
    body = body_of(await _samples(exchange))
    length = int.from_bytes(body[:HEADER_BYTES], "little") - 5
    await exchange.answer(length.to_bytes(HEADER_BYTES, "little") + body[HEADER_BYTES:])


@endpoint("stream", SAMPLES)
async def frame_in_drips(exchange: Exchange) -> None:
    """A frame of which a byte comes now and then, for ever."""
    await _begin(exchange, (60_000).to_bytes(HEADER_BYTES, "little"))
    await exchange.send_for_ever(_chunk(b"\x91"), pause_s=DRIP_S)


@endpoint("stream", SAMPLES)
async def empty_frames_for_ever(exchange: Exchange) -> None:
    """Frames without a sample, without end."""
    await _begin(exchange)
    await exchange.send_for_ever(_chunk(frame_of([]) * 2**12), pause_s=0.001)


@endpoint("stream", SAMPLES)
async def frame_full_of_spans(exchange: Exchange) -> None:
    """A frame as large as it may be, of spans of four bytes."""
    number = _room(exchange) // 4

    def payload(last: Sampled) -> bytes:
        head = _encode([0, last.index, "stop", last.token_ids, last.logprobs])
        spans = b"\xdd" + number.to_bytes(4, "big") + b"\x93\xa0\x00\x01" * number
        return b"\x91\x97" + head[1:] + spans

    await _with_last(exchange, payload)


@endpoint("stream", SAMPLES)
async def frame_full_of_refusals(exchange: Exchange) -> None:
    """A frame as large as it may be, of refusals of one sample."""
    number = _room(exchange) // 5
    head = b"\xdd" + number.to_bytes(4, "big")
    await _with_last(exchange, lambda last: head + b"\x94\x01\x00\x00\xa0" * number)


@endpoint("stream", SAMPLES)
async def numbers_beyond_the_frame(exchange: Exchange) -> None:
    """Four billion samples, spans or bytes, says a frame of a few bytes."""
    lies = (
        b"\xdd\xff\xff\xff\xff",
        b"\x91\x97\x00\x00\xa4stop\xc4\x00\xc4\x00\xdd\xff\xff\xff\xff",
        b"\x91\x97\x00\x00\xa4stop\xc6\xff\xff\xff\xff",
        b"\x91\x97\x00\x00\xdb\xff\xff\xff\xff",
    )
    await _with_last(exchange, lambda last: exchange.rng.choice(lies))


@endpoint("stream", SAMPLES)
async def frame_of_invalid_utf8(exchange: Exchange) -> None:
    """A finish reason that is not UTF-8."""
    await _with_last(
        exchange, lambda last: _encode([last]).replace(last.finish_reason.encode(), b"\xff" * 4)
    )


@endpoint("stream", SAMPLES)
async def frame_nested_deeply(exchange: Exchange) -> None:
    """A frame of ten thousand nested lists, in place of a sample or of its spans."""
    before = exchange.rng.choice((b"", b"\x91\x97\x00\x00\xa4stop\xc4\x00\xc4\x00"))
    await _with_last(exchange, lambda last: before + b"\x91" * 10_000 + b"\x90")


@endpoint("stream", SAMPLES)
async def frame_of_other_shapes(exchange: Exchange) -> None:
    """A map, a number, a sample of an unknown kind or with fields of other types."""
    shapes: tuple[object, ...] = (
        {"samples": []},
        7,
        [[7, 0, "stop"]],
        [[0, -1, "stop", b"", b"", [], 1]],
        [[0, 2**63, "stop", b"", b"", [], 1]],
        [[0, 0, "stop", [5], [-1.0], [], 1]],
        [[0, 0, "stop", b"", b"", [["v", -1, 2]], 1]],
    )
    await _with_last(exchange, lambda last: _encode(exchange.rng.choice(shapes)))


@endpoint("stream", SAMPLES)
async def json_in_a_stream(exchange: Exchange) -> None:
    """JSON where MessagePack was asked for, framed or as it is."""
    trees = (await exchange.forward()).trees
    body = msgspec.json.encode(trees)
    await exchange.answer(exchange.rng.choice((frame(body), body)))


@endpoint("stream", SAMPLES)
async def stream_compressed(exchange: Exchange) -> None:
    """A good stream in gzip, which nobody asked for."""
    body = gzip.compress(body_of(await _samples(exchange)))
    await exchange.send(http(body, "200 OK", "Content-Encoding: gzip"))


# ---- samples -------------------------------------------------------------------------------------


@endpoint("stream", SAMPLES)
async def sample_twice(exchange: Exchange) -> None:
    """The first sample once more, in place of the last one."""
    await _with_samples(exchange, lambda samples, _: [*samples[:-1], samples[0]])


@endpoint("stream", SAMPLES)
async def sample_not_asked_for(exchange: Exchange) -> None:
    """Before the others a sample with a number that none has."""
    await _with_samples(
        exchange, lambda samples, _: [_with(samples[-1], index=len(samples)), *samples]
    )


@endpoint("stream", SAMPLES)
async def sample_missing(exchange: Exchange) -> None:
    """A stream that ends without one of its samples."""

    def leave_out(samples: list[Sampled], rng: random.Random) -> list[Sampled]:
        return rng.sample(samples, len(samples) - 1)

    await _with_samples(exchange, leave_out)


@endpoint("stream", SAMPLES)
async def arrays_of_odd_lengths(exchange: Exchange) -> None:
    """Tokens and log-probabilities whose bytes are no whole numbers of four."""

    def cut(samples: list[Sampled], rng: random.Random) -> list[Sampled]:
        at = rng.randrange(1, 4)
        return [_with(s, token_ids=s.token_ids[:-at], logprobs=s.logprobs[:-at]) for s in samples]

    await _with_samples(exchange, cut)


@endpoint("stream", SAMPLES)
async def logprobs_of_no_number(exchange: Exchange) -> None:
    """NaN, infinity or -infinity as the log-probability of one token of each sample."""

    def spoil(samples: list[Sampled], rng: random.Random) -> list[Sampled]:
        spoilt = []
        for sample in samples:
            logprobs = np.frombuffer(sample.logprobs, LOGPROBS).copy()
            logprobs[rng.randrange(len(logprobs))] = rng.choice((np.nan, np.inf, -np.inf))
            spoilt.append(_with(sample, logprobs=logprobs.tobytes()))
        return spoilt

    await _with_samples(exchange, spoil)


@endpoint("stream", SAMPLES, may_end_75=True)
async def samples_swapped(exchange: Exchange) -> None:
    """Samples under the numbers of those of another prompt of the same request."""
    prompts = exchange.request.prompts
    samples = await _samples(exchange)
    half = len(samples) // 2
    moved = samples[half:] + samples[:half]
    if all(prompts[old.index] == prompt for old, prompt in zip(moved, prompts, strict=True)):
        raise NotNow
    renumbered = [_with(sample, index=index) for index, sample in enumerate(moved)]
    await exchange.answer(body_of(renumbered))


@endpoint("stream", SAMPLES, refuses=True)
async def every_sample_refused(exchange: Exchange) -> None:
    """400 to each sample of a stream; single requests are answered."""
    refused = [Refused(index, 400, "no") for index in range(len(exchange.request.prompts))]
    await exchange.answer(frame_of(refused))


@endpoint("stream", SAMPLES, refuses=True)
async def samples_of_the_dataset_refused(exchange: Exchange) -> None:
    """413 to half of the samples of the dataset's prompts, the others are sent."""

    def refuse(samples: list[Sampled], rng: random.Random) -> list[Ended]:
        return [s if s.index % 2 else Refused(s.index, 413, "too long") for s in samples]

    if any(len(prompt) != PROMPT_TOKENS for prompt in exchange.request.prompts):
        raise NotNow
    await _with_samples(exchange, refuse)


@endpoint("stream", SAMPLES)
async def refusals_of_strange_statuses(exchange: Exchange) -> None:
    """Samples refused with statuses of 200, 99, 0, -400 and 10^12."""

    def refuse(samples: list[Sampled], rng: random.Random) -> list[Ended]:
        return [
            Refused(s.index, rng.choice((200, 99, 0, -400, 10**12)), "\x1b[2J" * 50)
            for s in samples
        ]

    await _with_samples(exchange, refuse)


@endpoint("stream", SAMPLES)
async def key_in_samples(exchange: Exchange) -> None:
    """The run's key as a finish reason, a refusal's message, a version, or noise, in turns."""
    await _with_key(exchange, key_of(exchange))


@endpoint("stream", SAMPLES)
async def key_escaped_in_samples(exchange: Exchange) -> None:
    """The same with each of the key's characters escaped as JSON may have it."""
    await _with_key(exchange, "".join(f"\\u{ord(letter):04x}" for letter in key_of(exchange)))


async def _with_key(exchange: Exchange, key: str) -> None:
    *samples, last = await _samples(exchange)
    span = last.version_spans[0]._replace(version=key)
    turns = (
        frame_of([_with(last, finish_reason=key)]),
        frame_of([Refused(last.index, 503, f"asked with {key}")]),
        frame_of([_with(last, version_spans=(span,))]),
        frame(key.encode()),
    )
    await exchange.answer(body_of(samples) + turns[exchange.endpoint.happened % len(turns)])


# ---- ends ----------------------------------------------------------------------------------------


@endpoint("stream", SAMPLES)
async def stream_never_ends(exchange: Exchange) -> None:
    """Every sample, and then neither an end nor anything else."""
    await _begin(exchange, body_of(await _samples(exchange)))
    await exchange.hold()


@endpoint("stream", SAMPLES)
async def stream_goes_silent(exchange: Exchange) -> None:
    """The status, and then nothing."""
    await _begin(exchange)
    await exchange.hold()


@endpoint("stream", SAMPLES, ABORT)
async def sample_withheld(exchange: Exchange) -> None:
    """Every sample but one, then nothing; what is to be aborted is not, which is told with 500."""
    if exchange.request.path == ABORT:
        return await exchange.answer(b"", "500 Internal Server Error")
    samples = await _samples(exchange)
    await _begin(exchange, body_of(samples[:-1]))
    await exchange.hold()


@endpoint("stream", SAMPLES)
async def reset_between_samples(exchange: Exchange) -> None:
    """The connection is reset when half of the samples have been sent."""
    samples = await _samples(exchange)
    await _begin(exchange, body_of(samples[: len(samples) // 2]))
    await asyncio.sleep(DRIP_S)
    exchange.reset()


@endpoint("stream", SAMPLES)
async def streaming_route_gone(exchange: Exchange) -> None:
    """404 to the route that it says it has, as a proxy of vLLM's routes would; others answer."""
    await exchange.answer(b'{"detail": "Not Found"}', "404 Not Found")


def _room(exchange: Exchange) -> int:
    """Bytes for a frame that the client may take."""
    return len(exchange.request.prompts) * 2**16 - 2**12
