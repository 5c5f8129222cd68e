"""What a simulation is given, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

MOST_SIGMA = 10.0
_POSITIVE = (
    *("endpoints", "places", "ranks", "batch_size", "group_size", "prompt_tokens", "updates"),
    *("devices_per_endpoint", "devices_per_rank"),
)


def require_lengths(mean: float | None, sigma: float) -> None:
    """Raises ``ValueError`` for what no length can be drawn from, naming the option of the command.

    ``mean``: tokens; None: none was asked for. ``sigma``: of the lengths' logarithm.
    """
    if mean is not None and not (math.isfinite(mean) and mean > 0):
        raise ValueError(f"--mean-tokens: has to be a number above 0, and is {mean:g}")
    if not 0 <= sigma <= MOST_SIGMA:  # nor is nan
        raise ValueError(f"--sigma: has to be a number from 0 to {MOST_SIGMA:g}, and is {sigma:g}")


@dataclass(frozen=True)
class Lengths:
    """Tokens of responses: drawn from what was seen, or log-normal."""

    seen: Sequence[int] = ()
    mean: float = 0.0  # tokens, of the log-normal distribution before it is cut
    sigma: float = 0.0  # of its logarithm
    longest: int = 2**31  # tokens: what is longer is cut there
    # correlation of the responses of a group (of their logarithms; of seen ones, of their ranks)
    within_group: float = 0.0

    def __post_init__(self) -> None:
        require_lengths(None if len(self.seen) else self.mean, self.sigma)

    def draw(self, num_groups: int, group_size: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [num_groups, group_size], each at least 1."""
        shared = rng.standard_normal((num_groups, 1))
        own = rng.standard_normal((num_groups, group_size))
        z = np.sqrt(self.within_group) * shared + np.sqrt(1 - self.within_group) * own
        if len(self.seen):
            ranks = z.argsort(axis=None).argsort().reshape(z.shape)  # 0 … B·G - 1
            places = (ranks + rng.random(z.shape)) * len(self.seen) / z.size
            drawn = np.sort(np.asarray(self.seen))[places.astype(int)]
        else:
            drawn = np.exp(np.log(self.mean) - self.sigma**2 / 2 + self.sigma * z)
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Rates:
    """How fast one endpoint and one training rank are. Seconds."""

    decode_step_s: float  # a token of each of n sequences takes decode_step_s + n · decode_each_s
    decode_each_s: float
    prefill_s: float  # of a prompt's token
    request_s: float  # of a request, whatever its length; its score too
    train_token_s: float  # of a packed token on one rank
    train_group_s: float  # of a group, whatever its length: packing, journal
    # of a batch's packed tokens; left out is what carries no signal, and what responses share
    # behind the prompt
    trained_share: float
    update_s: float  # of an optimizer step that is not the batch's last, with what is beside it
    border_s: float  # from the last micro-batch's end to the next batch's first request

    def decode_s(self, running: int) -> float:
        """A token of each of so many sequences, at one endpoint."""
        return self.decode_step_s + running * self.decode_each_s


@dataclass(frozen=True)
class Setting:
    """One batch of a run."""

    rates: Rates
    lengths: Lengths
    endpoints: int
    places: int  # requests in flight at an endpoint
    ranks: int  # data-parallel
    batch_size: int  # prompts
    group_size: int  # G, responses of each
    prompt_tokens: int
    mode: Literal["async", "sync"] = "async"
    shares_prompts: bool = True  # a group is trained with its prompt once, not with each response
    updates: int = 1  # optimizer steps, each on its slice of the prompts
    devices_per_endpoint: int = 1
    devices_per_rank: int = 1

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: has to be positive, and is {getattr(self, name)}")

    @property
    def devices(self) -> int:
        return self.endpoints * self.devices_per_endpoint + self.ranks * self.devices_per_rank

    def packed_tokens(self, responses: Sequence[int]) -> int:
        """Of a group whose responses have so many tokens each."""
        prompts = 1 if self.shares_prompts else len(responses)
        return prompts * self.prompt_tokens + sum(responses)


@dataclass(frozen=True)
class Outcome:
    """A simulated batch; means over several draws of its lengths."""

    step_s: float  # from a batch's first request to the next one's
    first_group_s: float  # until training can begin in an asynchronous run
    last_group_s: float
    tokens: float  # of all sequences, each with its prompt (paper §6)
    training_idle: float  # share of the ranks' time
    inference_idle: float  # share of the endpoints' places

    def tpspd(self, setting: Setting) -> float:
        """The paper's measure (§6), TPSPD: tokens / (seconds · devices)."""
        return self.tokens / self.step_s / setting.devices
