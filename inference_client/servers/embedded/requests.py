"""Requests of the embedded engine, and the samples that answer them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from easyrl.inference_client.servers.embedded.sampling import Feature, SamplingParams, UniformStream
from easyrl.inference_client.servers.embedded.text import StopStrings
from easyrl.schema import VersionSpan


class BadRequestError(ValueError):
    """The request cannot be served as it is; ``param`` is the field at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class UnavailableError(RuntimeError):
    """Not now: the queue is full, the weights are not usable, or the engine has stopped."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The alternatives at one position, and the sampled token's rank among all (from 1)."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of one request, from its prompt to its end."""

    prompt: np.ndarray  # int64 [P]
    params: SamplingParams
    uniforms: UniformStream
    eos_token_id: int | None  # ends without a stop reason; None: ignored
    stop_token_ids: tuple[int, ...]  # all tokens that end it, eos included
    forbidden_early: tuple[int, ...]  # tokens that may not come before min_tokens
    stop_strings: StopStrings | None
    prompt_key: bytes = field(init=False)
    features: Feature = field(init=False)
    row: int = -1  # in the batch, while running
    record: int = -1
    token_ids: list[int] = field(default_factory=list)  # filled at the end, a stop token included
    logprobs: list[float] = field(default_factory=list)  # of the sampled tokens
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # per token, if asked for
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None  # None: end of sequence, length or abort

    def __post_init__(self) -> None:
        self.prompt_key = self.prompt.tobytes()
        self.features = self.params.features

    def stamp(self, version: str, start: int) -> None:
        """Tokens from ``start`` on are made by ``version``."""
        if self.version_starts and self.version_starts[-1][1] == start:
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, start))

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Of a finished sequence; a version without tokens has no span."""
        bounds = [*self.version_starts, ("", len(self.token_ids))]
        return tuple(
            VersionSpan(version, start, end)
            for (version, start), (_, end) in pairwise(bounds)
            if end > start
        )


@dataclass(eq=False, slots=True)
class GenerationRequest:
    """A prompt and how ``params.n`` samples of it are drawn. Its future gives them in order."""

    prompt: np.ndarray  # int64 [P]
    params: SamplingParams
    request_id: str = ""
    seed: int | None = None  # instead of that of ``params``, which requests may share
    future: Future[list[Sequence]] = field(default_factory=Future)
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
