"""Choosing the next token of every running sequence at once.

Shape legend: B running sequences, V vocabulary, K stop tokens per sequence.

The order of operations is vLLM's: penalties, minimum length, temperature, min_p, top_k, top_p. The
random part is an inverse CDF over one uniform number per token, drawn from the sequence's own
counter based generator, so that a sequence's randomness is a function of its seed and of the
token's position and never of what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Flag, auto
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from pydantic import BaseModel, BeforeValidator, Field, model_validator
from torch import Tensor

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
INT64 = 2**63
StopList = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class Feature(Flag):
    """What a sequence asks of the sampler beyond plain sampling at temperature 1."""

    GREEDY = auto()
    TEMPERATURE = auto()
    MIN_P = auto()
    TOP_K_TOP_P = auto()
    PENALTIES = auto()
    MIN_TOKENS = auto()
    TOP_LOGPROBS = auto()
    STOP_STRINGS = auto()


class SamplingParams(BaseModel):
    """vLLM's sampling parameters with its meanings and limits; null means the default."""

    unsupported: ClassVar[tuple[str, ...]] = (
        "allowed_token_ids",
        "bad_words",
        "logit_bias",
        "logprob_token_ids",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "structured_outputs",
        "thinking_token_budget",
        "trace_decode_token_ids",
    )

    n: int = Field(1, ge=1)  # samples
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    temperature: float = Field(1.0, ge=0, le=2)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 or -1: all
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: StopList = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int = Field(0, ge=1)  # by default as many as the context leaves room for
    min_tokens: int = Field(0, ge=0)
    logprobs: int | None = Field(None, ge=-1)  # alternatives per token; -1: the whole vocabulary
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known_here(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in cls.unsupported:
            value = data.get(key)
            is_unset = value in (None, "", [], {}) or value is False
            if not is_unset and (key, value) != ("priority", 0):
                raise ValueError(f"{key} is not supported by the embedded server")
        return {key: value for key, value in data.items() if value is not None}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must not exceed max_tokens={self.max_tokens}")
        if "" in self.stop:
            raise ValueError("stop cannot contain an empty string")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n must be 1 with greedy sampling (temperature 0), is {self.n}")
        return self

    @cached_property
    def features(self) -> Feature:
        is_greedy = self.temperature == 0
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        asked = {
            Feature.GREEDY: is_greedy,
            Feature.TEMPERATURE: not is_greedy and self.temperature != 1,
            Feature.MIN_P: not is_greedy and self.min_p > 0,
            Feature.TOP_K_TOP_P: not is_greedy and (self.top_k > 0 or self.top_p < 1),
            Feature.PENALTIES: penalties != (0, 0, 1),
            Feature.MIN_TOKENS: self.min_tokens > 0,
            Feature.TOP_LOGPROBS: bool(self.logprobs),
            Feature.STOP_STRINGS: bool(self.stop),
        }
        return Feature(sum(feature.value for feature, is_asked in asked.items() if is_asked))


class _Key(ISeedSequence):
    """Philox's key as it is; handed over as ``key=`` it costs a system call for entropy as well."""

    def __init__(self, seed: int, sample_index: int) -> None:
        self._key = np.array([seed % 2**64, sample_index], dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        assert (n_words, dtype) == (2, np.uint64)
        return self._key


class UniformStream:
    """Uniform numbers in [0, 1) of one sample: a function of seed, sample index, position."""

    def __init__(self, seed: int, sample_index: int) -> None:
        self._philox = np.random.Philox(_Key(seed, sample_index))  # type: ignore[arg-type]

    def bits(self, count: int) -> np.ndarray:
        """uint64 [count], what the next numbers are made of."""
        return self._philox.random_raw(count)


def uniform_numbers(streams: Sequence[UniformStream], count: int) -> np.ndarray:
    """float32 [streams, count], the next ``count`` of each, multiples of 2^-24."""
    bits = np.stack([stream.bits(count) for stream in streams])
    return ((bits >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, penalties: Tensor) -> Tensor:
    """Repetition, frequency and presence penalties; float32 [B, V].

    Args:
        logits: float32 [B, V].
        counts: int [B, V], how often each token was generated.
        in_prompt: bool [B, V], whether the prompt holds the token.
        penalties: float32 [B, 3], repetition, frequency, presence.
    """
    repetition, frequency, presence = penalties[:, :, None].unbind(1)
    generated = counts > 0
    factor = torch.where(generated | in_prompt, repetition, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency * counts - presence * generated


def forbid_early_stop(logits: Tensor, stop_ids: Tensor, too_early: Tensor) -> Tensor:
    """Stop tokens (int [B, K], -1 is padding) get -inf where ``too_early`` (bool [B])."""
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    forbidden.scatter_(1, stop_ids.clamp(min=0), (stop_ids >= 0) & too_early[:, None])
    # a row of padding writes False at token 0, so a real stop token 0 is set again
    forbidden[:, 0] = ((stop_ids == 0).any(1)) & too_early
    return logits.masked_fill(forbidden, -torch.inf)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drops tokens less probable than ``min_p`` (float32 [B]) times the most probable one."""
    threshold = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    return logits.masked_fill(logits < threshold, -torch.inf)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the ``top_k`` (int [B], 0: all) and of these the smallest set that reaches ``top_p``.

    The most probable token always stays.
    """
    vocab_size = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(top_k > 0, top_k, vocab_size)
    rank = torch.arange(vocab_size, device=logits.device)
    ordered = ordered.masked_fill(rank >= limit[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # probability of all better tokens
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulated probability passes ``uniform``; int64 [B].

    Args:
        probs: float32 [B, V].
        uniform: float32 [B], in [0, 1).
    """
    cumulated = probs.cumsum(-1)
    total = cumulated[:, -1:]
    # strictly below the total, or rounding could choose a token of probability zero at the end
    below_total = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniform[:, None] * total, below_total)
    return torch.searchsorted(cumulated, point, right=True).squeeze(1)
