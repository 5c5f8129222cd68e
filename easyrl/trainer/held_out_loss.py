"""The loss on held-out records, beside the batches of a run on records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from easyrl.config import EvaluationConfig
from easyrl.engines.base import TrainEngine
from easyrl.metrics.batch_metrics import BatchTotals, recipe_metrics
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.schedule import Due
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import MicroBatch, PolicyVersion, RolloutGroup
from easyrl.trainer.accumulation import GroupFunctions


class HeldOutLoss:
    """Every so many steps, and at start and end where that is wanted (``Evaluation``). Collective.

    ``groups`` are all held-out records, of which each data-parallel rank runs its share.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        groups: Sequence[RolloutGroup],
        engine: TrainEngine,
        collectives: Collectives,
        functions: GroupFunctions,
        stop: StopRequest,
        *,
        from_step: int,
    ) -> None:
        self._config = config
        ranks = collectives.ranks
        self._groups = groups[ranks.dp_rank :: ranks.dp_size]
        self._engine, self._collectives = engine, collectives
        self._functions, self._stop = functions, stop
        self._due = Due(config.every_steps, from_step)

    def begin(
        self, step: int, version: PolicyVersion, *, is_last: bool, again: bool = False
    ) -> RunningHeldOutLoss | None:
        """One of the present weights if it is due, or ``again``; ``finish`` computes it."""
        wanted = self._due.passes(step) or again
        wanted |= (step == 0 and self._config.at_start) or (is_last and self._config.at_end)
        return RunningHeldOutLoss(self) if wanted else None

    def metrics(self) -> dict[str, float]:
        """``eval/loss``, and what the recipe counts as ``eval/NAME``, of all ranks. Collective.

        ``time/evaluation_s`` is what it took this rank.
        Raises ``StopRequested`` on all ranks.
        """
        start = time.monotonic()
        totals = BatchTotals(denominator=self._functions.denominator(self._groups))
        work = self._rows(totals)
        if self._engine.lockstep:
            work = self._collectives.in_lockstep(work, self._functions.dummy)
        for row in work:
            totals.metrics.add(self._engine.evaluate(row))
        self._collectives.end_together(totals.interruption)
        told = recipe_metrics(totals.merge(self._collectives))
        figures = {f"eval/{name}": value for name, value in told.items()}
        return figures | {"time/evaluation_s": time.monotonic() - start}

    def _rows(self, totals: BatchTotals) -> Iterator[MicroBatch]:
        """Packed rows; ends early, noting it in ``totals``, when the run is asked to stop."""
        for row in self._functions.pack(self._functions.trained(self._groups, (), ())):
            try:
                self._stop.raise_if_requested()
            except Exception as error:
                totals.interruption = error
                return
            yield row


class RunningHeldOutLoss:
    """One evaluation, of the weights as they are until the batch's optimizer step."""

    def __init__(self, held_out: HeldOutLoss) -> None:
        self._held_out = held_out

    def finish(self) -> dict[str, float]:
        return self._held_out.metrics()

    def close(self) -> None:
        """Nothing is under way between two calls."""
