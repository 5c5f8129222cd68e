"""Delays in every second batch of a run: what they are compared with is the batch before."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from easyrl.ledger.journal.rollouts import JournalledRollouts


def is_held_up(batch: int) -> bool:
    """The first one, 0, is not counted, and 1 is not held up."""
    return batch > 0 and batch % 2 == 0


def write_records(prompts: Path, path: Path, batch_size: int, seconds: float) -> None:
    """``prompts`` for ``slow_environment``, which works for ``seconds`` in batches held up."""
    with prompts.open() as lines, path.open("w") as file:
        for number, line in enumerate(lines):
            works_s = seconds if is_held_up(number // batch_size) else 0.0
            file.write(json.dumps(json.loads(line) | {"works_s": works_s}) + "\n")


class Delay:
    """Seconds by which this batch is held up: ``seconds`` in every second one, 0 in others.

    ``before_begin``: what is held up comes before a batch's ``begin``, not behind it.
    """

    def __init__(self, seconds: float, *, before_begin: bool = False) -> None:
        self.of_batch_s = 0.0
        self.due_s = 0.0  # ... until it was taken
        self.number = 0 if before_begin else -1  # of the batch
        self._seconds = seconds
        self._has_begun = False

    def install(self) -> None:
        """Counts the batches of this process from now on."""
        begin = JournalledRollouts.begin

        def counted(*arguments: Any, **named: Any) -> Any:
            self.number += 1
            self._has_begun = False
            self.of_batch_s = self.due_s = self._seconds if is_held_up(self.number) else 0.0
            return begin(*arguments, **named)

        JournalledRollouts.begin = counted  # type: ignore[method-assign]

    def begins(self) -> bool:
        """Whether it is asked for the first time in this batch, held up or not."""
        begins, self._has_begun = not self._has_begun, True
        return begins

    def take(self) -> float:
        """What is due, once in a batch."""
        taken_s, self.due_s = self.due_s, 0.0
        return taken_s


def hold_up_calls(owner: Any, method: str, delay: Delay) -> None:
    """The first call of ``owner.method`` in a batch, a function or a coroutine, begins later."""
    original: Callable[..., Any] = getattr(owner, method)

    def held_up(*arguments: Any, **named: Any) -> Any:
        if taken_s := delay.take():
            time.sleep(taken_s)
        return original(*arguments, **named)

    async def held_up_async(*arguments: Any, **named: Any) -> Any:
        if taken_s := delay.take():
            await asyncio.sleep(taken_s)
        return await original(*arguments, **named)

    setattr(owner, method, held_up_async if inspect.iscoroutinefunction(original) else held_up)
