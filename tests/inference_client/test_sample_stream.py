"""The stream of samples: whatever an endpoint sends on it ends as a sample or as its fault."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import numpy as np
import pytest

from easyrl.completion_check import CompletionLimits
from easyrl.config import SamplingConfig
from easyrl.inference_client.api_keys import KeyErasure
from easyrl.inference_client.errors import MalformedResponse
from easyrl.inference_client.sample_stream import (
    Ended,
    Refused,
    Sampled,
    SampleReader,
    SamplesAsked,
    frame_of,
)
from easyrl.schema import VersionSpan

URL = "http://a"
PROMPT = np.array([5, 6, 7], dtype=np.int32)
ASKED = SamplesAsked("r", [(PROMPT, [1, 2]), (PROMPT + 1, [3])], SamplingConfig(max_tokens=4))
LIMITS = CompletionLimits(vocab_size=100, max_tokens=4)


def sampled(index: int = 0, **changes: object) -> Sampled:
    fields: dict = {
        "finish_reason": "stop",
        "token_ids": np.array([8, 9], dtype=np.int32).tobytes(),
        "logprobs": np.array([-0.5, -1.25], dtype=np.float32).tobytes(),
        "version_spans": (("r:0:1", 0, 2),),
        "num_prompt_tokens": 3,
    }
    return Sampled(index, **(fields | changes))


def read(content: bytes, key: str | None = None) -> list[Ended]:
    """All of an answer that comes at once."""
    reader = SampleReader(URL, ASKED, KeyErasure(key))
    ended = [one for frame in reader.feed(content) for one in frame]
    reader.end()
    return ended


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def test_samples_come_as_they_were_sent_however_the_bytes_are_cut():
    content = frame_of([sampled(2), Refused(0, 400, "no")]) + frame_of([]) + frame_of([sampled(1)])
    for size in (1, 3, 7, len(content)):
        reader, ended = SampleReader(URL, ASKED), []
        for begin in range(0, len(content), size):
            for frame in reader.feed(content[begin : begin + size]):
                ended += frame
        reader.end()
        assert [one.index for one in ended] == [2, 0, 1]
        assert ended[1] == Refused(0, 400, "no")
    made = ended[0].completion(URL, 3, LIMITS)
    assert made.token_ids.tolist() == [8, 9] and made.token_ids.dtype == np.int32
    assert made.logprobs.tolist() == [-0.5, -1.25] and made.logprobs.dtype == np.float32
    assert made.version_spans == (VersionSpan("r:0:1", 0, 2),)
    assert made.finish_reason == "stop" and made.endpoint == URL and made.loss_mask.all()


def test_all_samples_are_numbered_prompt_by_prompt():
    assert ASKED.num_samples == 3
    body = ASKED.body()
    assert [prompt["seeds"] for prompt in body["prompts"]] == [[1, 2], [3]]
    assert ASKED.id_of(2) == f"{body['request_id']}-2"


GOOD = frame_of([sampled(0), sampled(1), sampled(2)])
PAYLOAD = GOOD[4:]
BAD = {
    "too many": (GOOD + frame_of([sampled(3)]), "sample 3 of 3 was not asked for"),
    "far too many": (frame_of([sampled(2**31 - 1)]), "was not asked for"),
    "twice": (frame_of([sampled(0), sampled(0)]), "sample 0 of 3 came twice"),
    "twice, refused": (frame_of([sampled(1)]) + frame_of([Refused(1, 400, "")]), "came twice"),
    "too few": (frame_of([sampled(0), sampled(2)]), "ended without 1 of 3 samples"),
    "none": (b"", "ended without 3 of 3 samples"),
    "half a frame": (GOOD[:-5], "ended with .* bytes of a frame"),
    "half a header": (GOOD + b"\x01\x00", "ended with 2 bytes of a frame"),
    "an endless frame": (b"\xff\xff\xff\xff" + PAYLOAD, "a frame of 4294967295 bytes"),
    "JSON": (framed(b'[{"index": 0}]'), "not MessagePack|unexpected shape"),
    "text": (b"HTTP/1.1 200 OK\r\n\r\n", "a frame of"),
    "nothing in a frame": (framed(b""), "not MessagePack"),
    "trailing bytes": (framed(PAYLOAD + b"\x00"), "not MessagePack"),
    "no list": (framed(msgspec.msgpack.encode({"a": 1})), "unexpected shape"),
    "another tag": (framed(msgspec.msgpack.encode([[7, 0, "stop"]])), "unexpected shape"),
    "too few fields": (framed(msgspec.msgpack.encode([[0, 0, "stop"]])), "unexpected shape"),
    "a negative index": (framed(msgspec.msgpack.encode([[1, -1, 400, ""]])), "unexpected shape"),
    "an index as text": (framed(msgspec.msgpack.encode([[1, "0", 400, ""]])), "unexpected shape"),
    "tokens as a list": (
        framed(msgspec.msgpack.encode([[0, 0, "stop", [8, 9], b"", [], 3]])),
        "unexpected shape",
    ),
    "an endless version": (
        frame_of([sampled(version_spans=(("r" * 5000, 0, 2),))]),
        "unexpected shape",
    ),
    "a span below zero": (frame_of([sampled(version_spans=(("r", -1, 2),))]), "unexpected shape"),
    "deep lists": (framed(b"\x91" * 100_000 + b"\xc0"), "nested too deeply|unexpected shape|not M"),
    "a million refusals": (
        framed(b"\xdd\x00\x10\x00\x00" + b"\x94\x01\x00\x00\xa0" * 2**15),
        "unexpected shape.*length <= 4096",
    ),
    "a thousand spans": (
        frame_of([sampled(version_spans=(("", 0, 1),) * 1000)]),
        "unexpected shape.*length <= 16",
    ),
    "a long refusal": (frame_of([Refused(0, 400, "." * 4097)]), "unexpected shape.*4096"),
    "empty frames": (frame_of([]) * 4, "more than 3 frames"),
    "more bytes than asked for": (GOOD + b"\xff\xff\x0f\x00", "a frame of 1048575 bytes"),
    "invalid UTF-8": (framed(b"\x91\x94\x01\x00\xcd\x01\x90\xa2\xff\xfe"), "not MessagePack"),
}


def test_what_came_before_a_bad_frame_is_had():
    frames = SampleReader(URL, ASKED).feed(frame_of([sampled(1)]) + framed(b"abc"))
    assert [one.index for one in next(frames)] == [1]
    with pytest.raises(MalformedResponse):
        next(frames)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_stream_is_malformed_and_says_how(name):
    content, said = BAD[name]
    with pytest.raises(
        MalformedResponse, match=f"POST /inference/v1/samples: .*({said})"
    ) as caught:
        read(content)
    assert caught.value.url == URL and len(str(caught.value)) < 2000
    str(caught.value).encode()


BAD_SAMPLES = {
    "cut tokens": ({"token_ids": b"\x01\x02\x03"}, "no arrays"),
    "cut log-probabilities": ({"logprobs": b"\x01"}, "no arrays"),
    "no tokens": ({"token_ids": b"", "logprobs": b"", "version_spans": ()}, "no tokens"),
    "too many tokens": (
        {"token_ids": bytes(20), "logprobs": bytes(20), "version_spans": (("r", 0, 5),)},
        "5 tokens, max_tokens is 4",
    ),
    "fewer log-probabilities": ({"logprobs": bytes(4)}, "2 tokens but 1 log-prob"),
    "a negative token": (
        {"token_ids": np.array([8, -1], dtype=np.int32).tobytes()},
        r"token_ids\[1\] is -1",
    ),
    "a token beyond the vocabulary": (
        {"token_ids": np.array([100, 1], dtype=np.int32).tobytes()},
        r"token_ids\[0\] is 100",
    ),
    "NaN": ({"logprobs": np.array([-1, np.nan], dtype=np.float32).tobytes()}, "not a number"),
    "-inf": ({"logprobs": np.array([-np.inf, -1], dtype=np.float32).tobytes()}, r"logprobs\[0\]"),
    "above 0": ({"logprobs": np.array([-1, 3], dtype=np.float32).tobytes()}, "above 0"),
    "aborted": ({"finish_reason": "abort"}, "'abort'"),
    "no reason": ({"finish_reason": ""}, "finish_reason"),
    "spans that leave tokens out": ({"version_spans": (("r", 0, 1),)}, "do not cover 2 tokens"),
    "another prompt length": ({"num_prompt_tokens": 4}, "num_prompt_tokens: used 4 of 3"),
    "no spans": ({"version_spans": ()}, "do not cover 2 tokens"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_sample_that_is_nothing_to_train_on_is_its_own_fault(name):
    changes, said = BAD_SAMPLES[name]
    ended = read(frame_of([sampled(0, **changes), sampled(1), sampled(2)]))
    with pytest.raises(MalformedResponse, match=rf"samples\[0\]\..*{said}"):
        ended[0].completion(URL, 3, LIMITS)
    for other in ended[1:]:
        other.completion(URL, 3, LIMITS)


def test_an_answer_that_repeats_the_key_is_refused_unquoted():
    escaped = r"key \u006dy-secret%2dkey"
    for repeating in (
        Refused(1, 400, "key my-secret-key"),
        Refused(1, 400, escaped),
        sampled(1, finish_reason="my-secret-key"),
        sampled(1, version_spans=((escaped, 0, 2),)),
    ):
        content = frame_of([sampled(0), repeating, sampled(2)])
        assert len(read(content)) == 3
        with pytest.raises(MalformedResponse, match="repeats the API key") as caught:
            read(content, key="my-secret-key")
        assert "my-secret-key" not in str(caught.value) and escaped not in str(caught.value)
    with pytest.raises(MalformedResponse, match="repeats the API key"):
        read(framed(b"my-secret-key"), key="my-secret-key")  # no MessagePack
    for before in range(1980, 2001):  # what is quoted may end within it
        garbage = framed(b"\xff" * before + b"my-secret-key" * 2)
        with pytest.raises(MalformedResponse) as caught:
            read(garbage, key="my-secret-key")
        assert "my-s" not in str(caught.value)


def test_a_full_frame_of_spans_takes_little_memory():
    """Its bytes are bounded by what was asked for, an object is dozens of times as large."""
    asked = SamplesAsked("r", [(PROMPT, list(range(64)))], SamplingConfig(max_tokens=4))
    number = asked.max_bytes // 4 - 8
    head = b"\x91\x97\x00\x00\xa4stop\xc4\x00\xc4\x00\xdd" + number.to_bytes(4, "big")
    content = framed(head + b"\x93\xa0\x00\x01" * number)  # a million spans, 4 MB
    tracemalloc.start()
    try:
        with pytest.raises(MalformedResponse, match="length <= 16"):
            list(SampleReader(URL, asked).feed(content))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * asked.max_bytes


def test_random_changes_of_an_answer_end_as_samples_or_as_malformed():
    rng = random.Random(0)
    num_malformed = 0
    for _ in range(2000):
        content = bytearray(GOOD)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        try:
            for one in read(bytes(content)):
                if isinstance(one, Sampled):
                    one.completion(URL, 3, LIMITS)
        except MalformedResponse:
            num_malformed += 1
    assert 0 < num_malformed < 2000
