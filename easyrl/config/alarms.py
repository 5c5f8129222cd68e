"""Section ``alarms``: when a run looks as if it collapsed, and what happens then."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from easyrl.config.base import Section

OnAlarm = Literal["warn", "checkpoint", "stop"]
Remaining = Annotated[float, Field(gt=0, lt=1)]  # of what the run began with
Growth = Annotated[float, Field(gt=1)]  # times what the run began with
Share = Annotated[float, Field(gt=0, le=1)]


class AlarmsConfig(Section):
    """Collapse alarms: medians over windows of batches against thresholds (docs/alarms.md).

    A threshold of null switches its alarm off.
    """

    on_alarm: OnAlarm = "warn"  # checkpoint: writes one that stays; stop: saves and ends, status 2
    warmup_batches: NonNegativeInt = 5  # the first of the run, which are not looked at
    window: PositiveInt = 11  # batches of a median; what a run began with is the first window
    entropy_collapse: Remaining | None = 0.1  # of the policy's entropy, with no new best reward
    entropy_rebound: Share | None = 0.5  # of what the entropy has fallen, regained
    length_collapse: Remaining | None = 0.5  # of the mean response length, with no better reward
    truncation: Share | None = 0.25  # of the responses, more than at first cut off at max_tokens
    no_signal: Share | None = 0.75  # of the groups, with equal rewards or rejected
    kl: PositiveFloat | None = 0.5  # nats per token, to the reference
    clip_fraction: Growth | None = 5.0  # of the share of tokens whose ratio is clipped
    grad_norm: Growth | None = 3.0  # of the gradient's norm before the clip
    repetition: Share | None = 0.2  # of the n-grams, more than at first that are repeated
    logprob_diff: Growth | None = 3.0  # of the mean |Δ log-prob| to the inference server

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        settings = {"on_alarm", "warmup_batches", "window"}
        names = set(type(self).model_fields) - settings
        if self.on_alarm != "warn" and all(getattr(self, name) is None for name in names):
            raise ValueError(
                "on_alarm: has no effect with all thresholds null; set one, or remove it"
            )
        return self
