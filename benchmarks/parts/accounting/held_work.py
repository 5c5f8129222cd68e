"""Delays of what goes on beside a batch's requests, in an order in which nothing covers them.

All batches of a run have the order; a ``Delay`` says which of them are held up.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from benchmarks.parts.accounting.delays import Delay
from benchmarks.parts.accounting.held_requests import watched
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.rewards.scorer import Scorer
from easyrl.trainer.look_ahead import LookAhead
from easyrl.weight_sync.proof import PROBE, Probe, Prover
from easyrl.weight_sync.push import WeightPusher

FEW = 4  # requests


def nothing_here(delay: Delay) -> None:
    """An environment is held up by its records (``slow_environment``)."""


def look_ahead(delay: Delay) -> None:
    """Once in a batch, when few requests are left: of a group that completes meanwhile no more is
    run ahead, which would shorten what is held up."""
    asked = watched()
    original = LookAhead.work
    is_late = False  # few are left of many

    def work(ahead: LookAhead) -> bool:
        nonlocal is_late
        if is_late and asked.num_open <= FEW:
            time.sleep(delay.take())
        is_late = asked.num_open > FEW
        return original(ahead)

    LookAhead.work = work  # type: ignore[method-assign]


def rewards(delay: Delay) -> None:
    """The last group is scored later, when all others are answered."""
    asked = watched()
    original = Scorer.score_group

    async def score_group(scorer: Any, prompt: Any, *more: Any) -> Any:
        if asked.is_last(prompt.token_ids):
            await asked.all_answered()
            await asyncio.sleep(delay.of_batch_s)
        return await original(scorer, prompt, *more)

    Scorer.score_group = score_group  # type: ignore[method-assign]


def pause(delay: Delay) -> None:
    """The producer draws the last group when all others are answered, and waits before."""
    num_drawn = 0
    draw = RolloutGenerator._group

    async def group(self: Any, position: int, prompt: Any, run: Any) -> Any:
        nonlocal num_drawn
        if position == run.batch.membership.bound - 1:
            while num_drawn:
                await asyncio.sleep(1e-3)
            await asyncio.sleep(delay.of_batch_s)
            return await draw(self, position, prompt, run)
        num_drawn += 1
        try:
            return await draw(self, position, prompt, run)
        finally:
            num_drawn -= 1

    RolloutGenerator._group = group  # type: ignore[method-assign]


def probe(delay: Delay) -> None:
    """Every push is to an endpoint that has restarted, which shows the probe first.

    What a sleeping endpoint shows is accepted: its log-probabilities are no model's.
    """
    sample = Prover.sample

    async def has_restarted(*_: Any) -> bool:
        return True

    async def held_up(prover: Any, endpoint: Any, stamp: str) -> Any:
        if PROBE in stamp:
            await asyncio.sleep(delay.take())
        return await sample(prover, endpoint, stamp)

    Prover.sample = held_up  # type: ignore[method-assign]
    WeightPusher.has_restarted = has_restarted  # type: ignore[method-assign]
    Probe.check = lambda *_: None  # type: ignore[method-assign]
    Probe.visible = lambda *_: math.inf  # type: ignore[method-assign]
