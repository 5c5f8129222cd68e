"""Section ``rollout``: how training prompts are answered."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from easyrl.config.base import Section

# Sampling with any other value draws from another distribution than the policy's.
_ON_POLICY_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,  # the end is masked for so many tokens
}


class SamplingConfig(Section):
    """Sampling parameters, named as vLLM names them."""

    max_tokens: PositiveInt = 512  # of a response; one that is cut off there is truncated
    temperature: NonNegativeFloat = 1.0  # log-probabilities and losses are taken at it too; 0:
    # greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # tokens of the smallest set that has this
    # probability
    top_k: int = -1  # -1: all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # tokens with this share of the likeliest
    # one's probability
    presence_penalty: float = 0.0  # subtracted from logits of tokens that the response has
    frequency_penalty: float = 0.0  # the same, times how often it has them
    repetition_penalty: PositiveFloat = 1.0  # divides positive logits of tokens that prompt or
    # response have
    min_tokens: NonNegativeInt = 0  # before which a response does not end
    stop: list[str] = []  # texts that end a response
    stop_token_ids: list[int] = []  # tokens that end a response
    ignore_eos: bool = False  # responses go on behind their end, to max_tokens

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError("must be -1 (all tokens) or at least 1")
        return value

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: {self.min_tokens} is more than max_tokens, which is "
                f"{self.max_tokens}; lower it"
            )
        return self


class RolloutConfig(SamplingConfig):
    """How the training responses are sampled."""

    num_generations: Annotated[int, Field(ge=1)] = 8  # G
    allow_off_policy_sampling: bool = False  # top_p, penalties, ...: the ratios are biased
    queue_size: PositiveInt = 64  # groups that may wait between producer and trainer

    @model_validator(mode="after")
    def _on_policy(self) -> Self:
        if self.temperature == 0:
            raise ValueError(
                "temperature: 0 is greedy, a group's responses would all be equal; use 1.0"
            )
        return self


def rollout_contradictions(rollout: RolloutConfig) -> list[str]:
    """Values of the section that do not go together, each with its key and the remedy."""
    problems = []
    if not rollout.allow_off_policy_sampling:
        problems += [
            f"rollout.{key}: {getattr(rollout, key)} samples from another distribution than the "
            f"policy that is trained, its ratios are biased; use {neutral}, or set "
            "rollout.allow_off_policy_sampling=true"
            for key, neutral in _ON_POLICY_SAMPLING.items()
            if getattr(rollout, key) != neutral
        ]
    return problems
