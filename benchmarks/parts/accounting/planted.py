"""A trainer in which one part of every second batch takes longer than it would.

``python -m benchmarks.parts.accounting.planted PART SECONDS TRAIN_S TRAIN_TOKEN_S CONFIG
[key=value …]``: the part is held up by SECONDS, once in each of these batches; each micro-batch
takes TRAIN_S more, and TRAIN_TOKEN_S for each of its tokens, so that training has a length that
does not depend on this machine. With a PART the responses of a batch are as long as those of every
other one, so that they can be compared.
"""

from __future__ import annotations

import sys
import time
from contextvars import ContextVar
from typing import Any

from benchmarks.parts.accounting.delays import Delay
from benchmarks.parts.accounting.parts import PARTS
from easyrl.build import inference
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.train import main


def same_seeds() -> None:
    """A sample's seed says at which place of a batch it is, and not of which batch."""
    place = ContextVar[int]("place")
    draw, sample_seed = RolloutGenerator._group, inference.sample_seed

    async def group(generator: Any, position: int, prompt: Any, run: Any) -> Any:
        place.set(position)
        return await draw(generator, position, prompt, run)

    def seed_of_place(run_seed: int, epoch: int, index: int, sample: int) -> int:
        return sample_seed(run_seed, 0, place.get(), sample)

    RolloutGenerator._group = group  # type: ignore[method-assign]
    inference.sample_seed = seed_of_place


def slow_training(seconds: float, seconds_per_token: float) -> None:
    """Each call for micro-batches takes so long, by their tokens, unless its own work does."""
    original = DeepSpeedEngine.forward_backward

    def forward_backward(self: DeepSpeedEngine, micro_batches: Any) -> Any:
        began_s = time.monotonic()
        found = original(self, micro_batches)
        num_tokens = sum(each.num_tokens for each in micro_batches)
        took_s = time.monotonic() - began_s
        time.sleep(max(0.0, seconds + num_tokens * seconds_per_token - took_s))
        return found

    DeepSpeedEngine.forward_backward = forward_backward  # type: ignore[method-assign]


if __name__ == "__main__":
    name, seconds = sys.argv[1], tuple(map(float, sys.argv[2:5]))
    if any(seconds[1:]):
        slow_training(*seconds[1:])
    if name in PARTS:
        same_seeds()
        delay = Delay(seconds[0], before_begin=PARTS[name].before_begin)
        delay.install()
        PARTS[name].plant(delay)
    sys.exit(main(sys.argv[5:]))
