"""Which strikes a chaos run will see: drawn beforehand, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

TrainerStrike = Literal[
    "rank killed",  # SIGKILL to one rank, as by the kernel's out-of-memory killer
    "all killed",  # SIGKILL to every process of the run, as a crash of the machine
    "launcher killed",  # SIGKILL to the deepspeed command
    "launcher ended",  # SIGTERM to the deepspeed command
    "rank ended",  # SIGTERM to one rank
    "job ended",  # SIGTERM to the process group, as a scheduler does
]
EndpointStrike = Literal["endpoint killed", "endpoint ended"]
How = TrainerStrike | EndpointStrike

TRAINER_STRIKES: dict[TrainerStrike, float] = {
    "rank killed": 0.25,
    "all killed": 0.25,
    "launcher killed": 0.1,
    "launcher ended": 0.15,
    "rank ended": 0.1,
    "job ended": 0.15,
}
ENDPOINT_STRIKES: dict[EndpointStrike, float] = {"endpoint killed": 0.6, "endpoint ended": 0.4}
TRAINER_SHARE = 0.55
START_SHARE = (
    0.35  # of the strikes: also while the trainer starts, which is most of a short attempt
)
CALM_END = 0.1  # of the batches: by then all strikes have to have fallen


@dataclass(frozen=True)
class Strike:
    """A blow that falls within a moment after the run has closed ``due`` batches."""

    how: How
    due: int
    at_start: bool  # also before an attempt's first batch
    moment: float  # in [0, 1): when within that time
    victim: float  # in [0, 1): which of those that it may hit
    gone: float  # in [0, 1): how long an endpoint stays away, as a share of the longest

    @property
    def hits_trainer(self) -> bool:
        return self.how in TRAINER_STRIKES


def plan_strikes(num_kills: int, num_batches: int, seed: int) -> list[Strike]:
    """``num_kills`` strikes in the order in which they fall, more than half at the trainer.

    Many fall together and others far apart: their times are uniform over the batches.
    """
    rng = random.Random(seed)
    num_trainer = -int(-num_kills * TRAINER_SHARE // 1)
    hows: list[How] = [
        *rng.choices(list(TRAINER_STRIKES), list(TRAINER_STRIKES.values()), k=num_trainer),
        *rng.choices(
            list(ENDPOINT_STRIKES), list(ENDPOINT_STRIKES.values()), k=num_kills - num_trainer
        ),
    ]
    rng.shuffle(hows)
    last = max(1, int(num_batches * (1 - CALM_END)))
    dues = sorted(rng.randrange(last) for _ in hows)
    return [
        Strike(how, due, rng.random() < START_SHARE, rng.random(), rng.random(), rng.random())
        for how, due in zip(hows, dues, strict=True)
    ]
