"""A trainer in which one part of each batch takes longer than it would.

``python -m benchmarks.parts.accounting.planted PART SECONDS TRAIN_S TRAIN_TOKEN_S CONFIG
[key=value …]``: the part is held up by SECONDS, once in each batch; each micro-batch takes TRAIN_S
more, and TRAIN_TOKEN_S for each of its tokens, so that training has a length that does not depend
on this machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.parts.accounting.parts import PARTS, Part
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.rewards.scorer import Scorer
from easyrl.train import main
from easyrl.trainer.look_ahead import LookAhead

FEW = 4  # requests


class OncePerBatch:
    """Says of each call whether it is the one of its batch that is held up."""

    def __init__(self) -> None:
        self.is_due = True
        self._begin = JournalledRollouts.begin

    def install(self) -> None:
        def begin(*arguments: Any, **named: Any) -> Any:
            self.is_due = True
            return self._begin(*arguments, **named)

        JournalledRollouts.begin = begin  # type: ignore[method-assign]

    def take(self) -> bool:
        was_due, self.is_due = self.is_due, False
        return was_due


def plant(part: Part, seconds: float) -> None:
    """Holds ``part`` up once a batch; of requests, those that begin it or its last group's."""
    if part.owner is RolloutGenerator:
        _plant_pause(seconds)
        return
    once = OncePerBatch()
    original: Callable[..., Any] = getattr(part.owner, part.method)
    if part.num_endpoints > 1:
        once.install()
        _plant_one_request(seconds, once)
        return
    if part.owner is Scorer:
        _plant_rewards(original, seconds)
        return
    if part.owner is EndpointPool:
        once.install()
        _plant_requests(seconds, once, last=part.of_last_group)
        return
    if part.owner is LookAhead:
        _plant_look_ahead(original, seconds)
        return
    if part.method != "begin":
        once.install()

    def held_up(*arguments: Any, **named: Any) -> Any:
        if part.method == "begin" or once.take():
            time.sleep(seconds)
        return original(*arguments, **named)

    async def held_up_async(*arguments: Any, **named: Any) -> Any:
        if once.take():
            await asyncio.sleep(seconds)
        return await original(*arguments, **named)

    setattr(part.owner, part.method, held_up_async if part.is_async else held_up)


class Asked:
    """Requests that endpoints have not answered, and the prompt that was drawn last."""

    def __init__(self) -> None:
        self.num_open = 0
        self._latest: Any = None

    def install(self) -> None:
        draw, ask = RolloutGenerator._group, EndpointPool.ask

        async def group(generator: Any, position: int, prompt: Any, run: Any) -> Any:
            self._latest = prompt.token_ids
            return await draw(generator, position, prompt, run)

        async def counted(pool: Any, *arguments: Any, **named: Any) -> Any:
            self.num_open += 1
            try:
                return await ask(pool, *arguments, **named)
            finally:
                self.num_open -= 1

        RolloutGenerator._group = group  # type: ignore[method-assign]
        EndpointPool.ask = counted  # type: ignore[method-assign]

    def is_latest(self, token_ids: Any) -> bool:
        return token_ids is self._latest

    async def all_answered(self) -> None:
        while self.num_open:
            await asyncio.sleep(1e-3)


def _plant_requests(seconds: float, once: OncePerBatch, *, last: bool) -> None:
    """The requests with which a batch begins are later, or those of the group that is drawn last.

    The former keep their places meanwhile: what is sent behind them is as much later. The latter
    are answered behind all others, so that nothing else covers them.
    """
    asked = Asked()
    asked.install()
    counted = EndpointPool.ask

    async def ask(pool: Any, endpoint: Any, prompt_token_ids: Any, *more: Any, **named: Any) -> Any:
        begins = once.is_due
        answer = await counted(pool, endpoint, prompt_token_ids, *more, **named)
        if last and asked.is_latest(prompt_token_ids):
            await asked.all_answered()
            await asyncio.sleep(seconds)
        elif begins and not last:
            await asyncio.sleep(seconds)
            once.take()  # others begin behind the first answer
        return answer

    EndpointPool.ask = ask  # type: ignore[method-assign]


def _plant_one_request(seconds: float, once: OncePerBatch) -> None:
    """The first request of a batch at one endpoint is answered behind all others."""
    asked = Asked()
    asked.install()
    counted = EndpointPool.ask
    urls: set[str] = set()

    async def ask(pool: Any, endpoint: Any, *more: Any, **named: Any) -> Any:
        urls.add(endpoint.url)
        is_held_up = endpoint.url == min(urls) and once.take()
        answer = await counted(pool, endpoint, *more, **named)
        if is_held_up:
            await asked.all_answered()
            await asyncio.sleep(seconds)
        return answer

    EndpointPool.ask = ask  # type: ignore[method-assign]


def _plant_look_ahead(original: Callable[..., Any], seconds: float) -> None:
    """Once a batch, when few requests are left: of a group that completes meanwhile no more is run
    ahead, which would shorten what is held up."""
    asked = Asked()
    asked.install()
    is_due = False

    def work(ahead: LookAhead) -> bool:
        nonlocal is_due
        if asked.num_open > FEW:
            is_due = True
        elif is_due:
            is_due = False
            time.sleep(seconds)
        return bool(original(ahead))

    LookAhead.work = work  # type: ignore[method-assign]


def _plant_rewards(original: Callable[..., Any], seconds: float) -> None:
    """The group that is drawn last is scored later, when all others are answered."""
    asked = Asked()
    asked.install()

    async def score_group(scorer: Any, prompt: Any, *more: Any) -> Any:
        if asked.is_latest(prompt.token_ids):
            await asked.all_answered()
            await asyncio.sleep(seconds)
        return await original(scorer, prompt, *more)

    Scorer.score_group = score_group  # type: ignore[method-assign]


def _plant_pause(seconds: float) -> None:
    """The producer draws the last group when all others are answered, and then waits."""
    num_drawn = 0
    draw = RolloutGenerator._group

    async def group(self: Any, position: int, prompt: Any, run: Any) -> Any:
        nonlocal num_drawn
        if position == run.batch.membership.bound - 1:
            while num_drawn:
                await asyncio.sleep(1e-3)
            await asyncio.sleep(seconds)
            return await draw(self, position, prompt, run)
        num_drawn += 1
        try:
            return await draw(self, position, prompt, run)
        finally:
            num_drawn -= 1

    RolloutGenerator._group = group  # type: ignore[method-assign]


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
        plant(PARTS[name], seconds[0])
    sys.exit(main(sys.argv[5:]))
