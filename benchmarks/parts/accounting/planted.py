"""A trainer in which one part of each batch takes longer than it would.

``python -m benchmarks.parts.accounting.planted PART SECONDS TRAIN_S CONFIG [key=value …]``: the
part is held up by SECONDS, once in each batch; each micro-batch takes TRAIN_S more, so that
training has a length that does not depend on this machine.
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
    ),
    "pause between requests": Part(
        RolloutGenerator, "_group", ("idle: nothing sent",), "endpoint", is_async=True
    ),
    "look-ahead": Part(
        LookAhead, "work", ("look_ahead",), in_sync=False, settings=("recipe.kl_coef=0.001",)
    ),
    "tail": Part(EndpointPool, "ask", ("tail",), "endpoint", is_async=True, of_last_group=True),
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
    if part.owner is EndpointPool:
        _plant_requests(original, seconds, last=part.of_last_group)
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


def _plant_requests(original: Callable[..., Any], seconds: float, *, last: bool) -> None:
    """All requests of a batch are later, or those of the group that is drawn last.

    These are answered behind all others, so that nothing else covers them.
    """
    latest: list[Any] = []
    num_asked = 0
    draw = RolloutGenerator._group

    async def group(self: Any, position: int, prompt: Any, run: Any) -> Any:
        latest.append(prompt.token_ids)
        return await draw(self, position, prompt, run)

    RolloutGenerator._group = group  # type: ignore[method-assign]

    async def ask(self: Any, endpoint: Any, prompt_token_ids: Any, *more: Any, **named: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        try:
            answer = await original(self, endpoint, prompt_token_ids, *more, **named)
        finally:
            num_asked -= 1
        if last:
            if not latest or prompt_token_ids is not latest[-1]:
                return answer
            while num_asked:
                await asyncio.sleep(1e-3)
        await asyncio.sleep(seconds)
        return answer

    EndpointPool.ask = ask  # type: ignore[method-assign]


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


def slow_training(seconds: float) -> None:
    """Each micro-batch takes so much longer."""
    original = DeepSpeedEngine.forward_backward

    def forward_backward(self: DeepSpeedEngine, micro_batches: Any) -> Any:
        time.sleep(seconds)
        return original(self, micro_batches)

    DeepSpeedEngine.forward_backward = forward_backward  # type: ignore[method-assign]


if __name__ == "__main__":
    name, planted_s, train_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    if train_s:
        slow_training(train_s)
    if planted_s:
        plant(PARTS[name], planted_s)
    sys.exit(main(sys.argv[4:]))
