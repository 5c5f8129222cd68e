"""One sample of one request, from its prompt to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from easyrl.inference_client.servers.embedded.sampling import Feature, SamplingParams, UniformStream
from easyrl.inference_client.servers.embedded.text import StopStrings
from easyrl.schema import VersionSpan

FinishReason = Literal["stop", "length", "abort"]


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
    features: Feature
    stop_strings: StopStrings | None = None
    prompt_key: bytes = b""
    row: int = -1  # in the batch, while running
    record: int = -1
    token_ids: list[int] = field(default_factory=list)  # filled at the end
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.prompt_key = self.prompt.tobytes()

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
