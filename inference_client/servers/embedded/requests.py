"""Requests and results of the embedded engine."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from easyrl.inference_client.servers.embedded.sampling import SamplingParams
from easyrl.inference_client.servers.embedded.sequence import FinishReason, Sequence, TopLogprobs
from easyrl.schema import VersionSpan


class BadRequestError(ValueError):
    """The request cannot be served as it is; ``param`` is the field at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class UnavailableError(RuntimeError):
    """Not now: the queue is full, the weights are not usable, or the engine has stopped."""


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """One finished sample of a request."""

    token_ids: list[int]  # the stop token, if one ended it, is the last
    logprobs: list[float]  # of the sampled tokens
    top_logprobs: list[TopLogprobs]  # per token, if asked for
    finish_reason: FinishReason
    stop_reason: int | str | None  # None: end of sequence, length or abort
    text: str | None  # up to the stop string that ended it; None: decode the tokens
    version_spans: tuple[VersionSpan, ...]

    @classmethod
    def of(cls, sequence: Sequence) -> GeneratedSample:
        assert sequence.finish_reason is not None
        stopped_by_string = isinstance(sequence.stop_reason, str)
        strings = sequence.stop_strings
        return cls(
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            top_logprobs=sequence.top_logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            text=strings.text if strings and stopped_by_string else None,
            version_spans=sequence.version_spans,
        )


@dataclass(eq=False, slots=True)
class GenerationRequest:
    """A prompt and how many samples of it are wanted. Its future gives the samples in order."""

    prompt: np.ndarray  # int64 [P]
    params: SamplingParams
    num_samples: int = 1
    request_id: str = ""
    future: Future[list[GeneratedSample]] = field(default_factory=Future)
    sequences: list[Sequence] = field(default_factory=list)
    num_running: int = 0  # samples that are not finished


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; read from any thread, written by the engine's."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    finished_requests: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0  # spent in prefill and decode
