"""Streamed answers as the JSON that ``/inference/v1/generate`` would have given for each sample.

So that what spoils a response spoils a sample of a stream as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.parts.hostile.behaviour import NotNow
from easyrl.inference_client.sample_stream import (
    LOGPROBS,
    TOKEN_IDS,
    Ended,
    Sampled,
    frame_of,
)
from easyrl.runtime.frames import FrameSplitter

Json = dict[str, Any]
_decode = msgspec.msgpack.Decoder(list[Ended]).decode


def samples_of(body: bytes) -> list[Sampled]:
    """All of an answer by their numbers; ``NotNow`` if one was refused or has no token."""
    samples = []
    for payload in FrameSplitter().feed(body):
        for ended in _decode(payload):
            if not isinstance(ended, Sampled) or not ended.token_ids:
                raise NotNow
            samples.append(ended)
    return sorted(samples, key=lambda sample: sample.index)


def body_of(samples: Sequence[Ended]) -> bytes:
    """A frame for each, as if none had finished together with another."""
    return b"".join(frame_of([sample]) for sample in samples)


def tree_of(sample: Sampled) -> Json:
    token_ids = np.frombuffer(sample.token_ids, TOKEN_IDS).tolist()
    logprobs = np.frombuffer(sample.logprobs, LOGPROBS).tolist()
    content = [
        {"token_id": token_id, "logprob": logprob}
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": sample.finish_reason,
        "token_ids": token_ids,
        "logprobs": {"content": content},
        "weight_versions": [span._asdict() for span in sample.version_spans],
    }
    return {"choices": [choice], "usage": {"prompt_tokens": sample.num_prompt_tokens}}


def sample_of(index: int, tree: Json) -> Sampled:
    choice = tree["choices"][0]
    return Sampled(
        index,
        choice["finish_reason"],
        np.array(choice["token_ids"], dtype=TOKEN_IDS).tobytes(),
        np.array([e["logprob"] for e in choice["logprobs"]["content"]], dtype=LOGPROBS).tobytes(),
        tuple((s["version"], s["start"], s["end"]) for s in choice["weight_versions"]),  # type: ignore[misc]
        tree["usage"]["prompt_tokens"],
    )
