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
from typing import Any, NamedTuple

from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.ledger.ledger import Ledger
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.reporter import StepReporter
from easyrl.rewards.scorer import Scorer
from easyrl.train import main
from easyrl.trainer.evaluation import RunningEvaluation
from easyrl.trainer.look_ahead import LookAhead
from easyrl.trainer.loop import Trainer
from easyrl.weight_sync.proof import Prover
from easyrl.weight_sync.publish import WeightSync
from easyrl.weight_sync.push import WeightPusher


class Part(NamedTuple):
    """Something that can be held up, and where its time has to show."""

    owner: Any
    method: str
    causes: tuple[str, ...]  # of the rank's lane, or else of the endpoint's
    lane: str = "rank"
    is_async: bool = False
    of_last_group: bool = False  # of each batch, not of its first call
    while_training_waits: bool = False  # else training would hide it
    # where it shows in a synchronous run, too, which has one wait for all groups and no look-ahead
    in_sync: bool = True
    settings: tuple[str, ...] = ()  # that a run needs to have this part; {folder}: of the workload
    num_endpoints: int = 1
    # where the order of a batch's requests has to be another one for the delay to be seen: what it
    # is compared with has that order, too, and no delay
    reorders: bool = False


EVALUATION = (
    "evaluation.data.files=[{folder}/prompts.jsonl]",
    "evaluation.data.apply_chat_template=false",
    "evaluation.data.max_prompt_tokens=40",
    "evaluation.data.max_records=4",
    "evaluation.every_steps=1",
    "evaluation.sampling.min_tokens=4",
    "evaluation.sampling.max_tokens=8",
)
# A probe is shown once in a run's attempt, before the first batch, which is not counted.
PARTS = {
    "dispatch": Part(JournalledRollouts, "begin", ("begin",)),
    "settle": Part(WeightSync, "settle", ("settle",)),
    "first response": Part(EndpointPool, "ask", ("first group",), is_async=True, in_sync=False),
    "later responses": Part(
        EndpointPool,
        "ask",
        ("starved",),
        is_async=True,
        of_last_group=True,
        while_training_waits=True,
        in_sync=False,
        reorders=True,
    ),
    # nobody says why a prompt is not sent
    "pause between requests": Part(
        RolloutGenerator, "_group", ("unexplained",), "endpoint", is_async=True, reorders=True
    ),
    "rewards": Part(
        Scorer,
        "score_group",
        ("idle: rewards",),
        "endpoint",
        is_async=True,
        of_last_group=True,
        while_training_waits=True,
        reorders=True,
    ),
    "look-ahead": Part(
        LookAhead, "work", ("look_ahead",), in_sync=False, settings=("recipe.kl_coef=0.001",)
    ),
    "tail": Part(
        EndpointPool,
        "ask",
        ("tail",),
        "endpoint",
        is_async=True,
        of_last_group=True,
        reorders=True,
    ),
    # one request of one endpoint; of the other's lane
    "others' tail": Part(
        EndpointPool,
        "ask",
        ("idle: others' tail",),
        "endpoint",
        is_async=True,
        num_endpoints=2,
        reorders=True,
    ),
    "packing": Part(BatchTotals, "add_group", ("pack",)),
    "training": Part(DeepSpeedEngine, "forward_backward", ("train",)),
    # of a run of one rank: what it does to be with the others
    "ranks": Part(Trainer, "_merged", ("ranks",)),
    "evaluation": Part(RunningEvaluation, "finish", ("evaluation",), settings=EVALUATION),
    "check": Part(Ledger, "check", ("check",)),
    "step": Part(DeepSpeedEngine, "optimizer_step", ("step",)),
    "push": Part(WeightPusher, "push", ("push",), "endpoint", is_async=True),
    "proof": Part(Prover, "prove_bits", ("proof",), "endpoint", is_async=True),
    # the tolerance is of log-probabilities that nobody has computed
    "canary": Part(
        Prover,
        "compare_samples",
        ("canary",),
        "endpoint",
        is_async=True,
        settings=("weight_sync.canary=true", "weight_sync.canary_tolerance=100"),
    ),
    "push, at the trainer": Part(WeightPusher, "push", ("sync",), is_async=True),
    "ledger": Part(Ledger, "close_batch", ("ledger",)),
    "report": Part(StepReporter, "report", ("report",)),
    "checkpoint": Part(Ledger, "save_if_due", ("save",)),
}


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
    """Holds ``part`` up once a batch; of requests, all of a batch's first or last group."""
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
        _plant_requests(seconds, last=part.of_last_group)
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


def _plant_requests(seconds: float, *, last: bool) -> None:
    """All requests of a batch are later, or those of the group that is drawn last.

    These are answered behind all others, so that nothing else covers them.
    """
    asked = Asked()
    asked.install()
    counted = EndpointPool.ask

    async def ask(pool: Any, endpoint: Any, prompt_token_ids: Any, *more: Any, **named: Any) -> Any:
        answer = await counted(pool, endpoint, prompt_token_ids, *more, **named)
        if last:
            if not asked.is_latest(prompt_token_ids):
                return answer
            await asked.all_answered()
        await asyncio.sleep(seconds)
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
    """Each call for micro-batches takes so much longer, by their tokens."""
    original = DeepSpeedEngine.forward_backward

    def forward_backward(self: DeepSpeedEngine, micro_batches: Any) -> Any:
        num_tokens = sum(each.num_tokens for each in micro_batches)
        time.sleep(seconds + num_tokens * seconds_per_token)
        return original(self, micro_batches)

    DeepSpeedEngine.forward_backward = forward_backward  # type: ignore[method-assign]


if __name__ == "__main__":
    name, seconds = sys.argv[1], tuple(map(float, sys.argv[2:5]))
    if any(seconds[1:]):
        slow_training(*seconds[1:])
    if name in PARTS:
        plant(PARTS[name], seconds[0])
    sys.exit(main(sys.argv[5:]))
