"""Samples of several prompts as one streamed answer: a route of the embedded server, its format.

``POST /inference/v1/samples`` asks for a sample per seed of each prompt, in JSON (``SamplesAsked``;
samples are numbered prompt by prompt, in the order of their seeds). The answer is sent while
samples finish: frames (``runtime.frames``), each a MessagePack list of ``Sampled`` and ``Refused``,
one of them for each sample. Used by both sides; imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from easyrl.completion_check import CompletionLimits, completion_problem
from easyrl.config import SamplingConfig
from easyrl.inference_client.answers import RESPONSE_BYTES, Count, Word, decode
from easyrl.inference_client.api_keys import KeyErasure
from easyrl.inference_client.errors import MalformedResponse
from easyrl.runtime.frames import FrameSplitter, FrameTooLong, frame
from easyrl.schema import Completion, VersionSpan

SAMPLES = "/inference/v1/samples"
ROUTE = f"POST {SAMPLES}"
TOKEN_BYTES = 8  # its id, its log-probability
TOKEN_IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
# A span or a refusal takes 4 or 5 bytes here and 100 as an object: bytes alone bound no memory.
MOST_SPANS = 16  # of one sample: the weights moved so often while it was made
MOST_IN_FRAME = 4096  # samples
QUOTED_BYTES = 2**14  # of a frame, at most, with a key that is cut off there


class _Span(NamedTuple):
    version: Word
    start: Count
    end: Count


class Sampled(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A sample that has finished."""

    index: Count
    finish_reason: Word
    token_ids: bytes  # int32 [R]
    logprobs: bytes  # float32 [R]
    version_spans: Annotated[tuple[_Span, ...], msgspec.Meta(max_length=MOST_SPANS)]
    num_prompt_tokens: Count  # that it was sampled behind

    @property
    def texts(self) -> tuple[str, ...]:
        return self.finish_reason, *(span.version for span in self.version_spans)

    def completion(self, url: str, prompt_length: int, limits: CompletionLimits) -> Completion:
        """Raises ``MalformedResponse`` if it is nothing to train on (``completion_problem``).

        So is one that the server sampled behind other than ``prompt_length`` tokens.
        """
        problem: str | None = None
        try:
            token_ids = np.frombuffer(self.token_ids, TOKEN_IDS)
            logprobs = np.frombuffer(self.logprobs, LOGPROBS)
        except ValueError:
            problem = f"{len(self.token_ids)} and {len(self.logprobs)} bytes are no arrays"
        else:
            made = Completion(
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=self.finish_reason,
                version_spans=tuple(VersionSpan(*span) for span in self.version_spans),
                endpoint=url,
                loss_mask=np.ones(len(token_ids), dtype=bool),
            )
            problem = completion_problem(made, limits)
        if self.num_prompt_tokens != prompt_length:
            problem = f"num_prompt_tokens: used {self.num_prompt_tokens} of {prompt_length}"
        if problem is not None:
            raise MalformedResponse(url, f"{ROUTE}: samples[{self.index}].{problem}")
        return made


class Refused(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A sample that cannot be had, for the reason that an answer of this status would have given.

    Of ``/inference/v1/generate``, that is: the others of the request do not suffer from it.
    """

    index: Count
    status: int
    message: Word

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.message,)


Ended: TypeAlias = Sampled | Refused

_encode = msgspec.msgpack.Encoder().encode
_Frame: TypeAlias = Annotated[list[Ended], msgspec.Meta(max_length=MOST_IN_FRAME)]
_DECODER: msgspec.msgpack.Decoder[list[Ended]] = msgspec.msgpack.Decoder(_Frame)


def frame_of(ended: Sequence[Ended]) -> bytes:
    return frame(_encode(ended))


@dataclass(frozen=True)
class SamplesAsked:
    """What one request asks for."""

    request_id: str  # sample i of it is request_id-i at /inference/v1/abort_requests
    prompts: Sequence[tuple[np.ndarray, Sequence[int]]]  # int32 [P], the seeds of its samples
    sampling: SamplingConfig

    @property
    def num_samples(self) -> int:
        return sum(len(seeds) for _, seeds in self.prompts)

    @cached_property
    def prompt_lengths(self) -> Sequence[int]:
        """Of each sample."""
        return [len(token_ids) for token_ids, seeds in self.prompts for _ in seeds]

    @property
    def max_bytes(self) -> int:
        """No good answer is longer."""
        return self.num_samples * (RESPONSE_BYTES + self.sampling.max_tokens * TOKEN_BYTES)

    def body(self) -> dict[str, Any]:
        params = self.sampling.model_dump(include=set(SamplingConfig.model_fields))
        return {
            "request_id": self.request_id,
            "sampling_params": params,
            "prompts": [{"token_ids": ids, "seeds": seeds} for ids, seeds in self.prompts],
        }

    def id_of(self, index: int) -> str:
        return f"{self.request_id}-{index}"


class SampleReader:
    """Reads an answer, part by part, as it comes; nothing of it is believed.

    Raises ``MalformedResponse`` for what is no frame, or repeats the API key that ``without_key``
    erases, for samples that were not asked for or come twice, for more frames than samples, and for
    an end before all have come.
    """

    def __init__(
        self, url: str, asked: SamplesAsked, without_key: KeyErasure | None = None
    ) -> None:
        self._url, self._without_key = url, without_key or KeyErasure(None)
        self._num_samples = asked.num_samples
        self._waiting = set(range(self._num_samples))
        self._frames = FrameSplitter(asked.max_bytes)
        self._num_frames = 0

    def feed(self, part: bytes) -> Iterator[list[Ended]]:
        """The samples of each frame that is complete with ``part``.

        What was good before something that is not is given first.
        """
        try:
            for payload in self._frames.feed(part):
                self._num_frames += 1
                if self._num_frames > self._num_samples:  # some are empty, maybe without end
                    many = f"more than {self._num_samples} frames ({len(part)} bytes at once)"
                    raise self._wrong(f"{many}, one a sample")
                yield self._ended(payload)
        except FrameTooLong as error:
            what = f"a frame of {error.num_bytes} bytes, which nothing asked for can take"
            raise self._wrong(what) from None

    def _ended(self, payload: bytes) -> list[Ended]:
        try:
            ended = decode(_DECODER, payload, self._url, ROUTE, form="MessagePack")
        except MalformedResponse:
            quoted = payload[:QUOTED_BYTES]  # it takes 10 MB/s, while everybody else waits
            if self._without_key.of_bytes(quoted) != quoted:
                raise self._wrong("repeats the API key") from None
            raise
        for one in ended:
            # what it says may come into logs; of the binary fields nothing does
            if any(self._without_key.of(text) != text for text in one.texts):
                raise self._wrong("repeats the API key")
            if one.index not in self._waiting:
                came = "came twice" if one.index < self._num_samples else "was not asked for"
                raise self._wrong(f"sample {one.index} of {self._num_samples} {came}")
            self._waiting.remove(one.index)
        return ended

    def end(self) -> None:
        """The answer has ended."""
        if num_left := self._frames.num_left:
            raise self._wrong(f"ended with {num_left} bytes of a frame (truncated?)")
        if self._waiting:
            missing = f"{len(self._waiting)} of {self._num_samples} samples"
            raise self._wrong(f"ended without {missing} (truncated?)")

    def _wrong(self, reason: str) -> MalformedResponse:
        return MalformedResponse(self._url, f"{ROUTE}: {reason}")
