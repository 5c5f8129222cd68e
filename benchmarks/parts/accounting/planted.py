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
from easyrl.weight_sync.proof import Prover
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


PARTS = {
    "dispatch": Part(JournalledRollouts, "begin", ("begin",)),
    "first response": Part(EndpointPool, "ask", ("first group",), is_async=True),
    "later responses": Part(
        EndpointPool,
        "ask",
        ("starved",),
        is_async=True,
        of_last_group=True,
        while_training_waits=True,
    ),
    "tail": Part(EndpointPool, "ask", ("tail",), "endpoint", is_async=True, of_last_group=True),
    "packing": Part(BatchTotals, "add_group", ("pack",)),
    "training": Part(DeepSpeedEngine, "forward_backward", ("train",)),
    "check": Part(Ledger, "check", ("check",)),
    "step": Part(DeepSpeedEngine, "optimizer_step", ("step",)),
    "push": Part(WeightPusher, "push", ("push",), "endpoint", is_async=True),
    "proof": Part(Prover, "prove_bits", ("proof",), "endpoint", is_async=True),
    "push, at the trainer": Part(WeightPusher, "push", ("sync",), is_async=True),
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
