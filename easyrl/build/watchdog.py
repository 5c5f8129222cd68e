"""The watchdog, which ends a run that makes no progress."""

from __future__ import annotations

from collections.abc import Callable

from easyrl.build.inference import Inference
from easyrl.build.run import OpenRun
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.runtime.watchdog import STUCK, UNWIND_S, Watchdog


def watch_progress(run: OpenRun, inference: Inference, rollouts: JournalledRollouts) -> None:
    """From now on too few tokens, generated or trained, end the run."""

    def describe() -> str:
        endpoints = "\n".join(map(str, inference.pool.states()))
        return f"{rollouts.num_waiting} finished groups wait for the trainer\n{endpoints}"

    run.opened.enter_context(
        Watchdog(
            run.config.watchdog,
            run.tokens,
            describe,
            lambda: run.signals.end(STUCK, UNWIND_S),
            in_outage=lambda: inference.in_outage,
            max_outage_s=run.config.inference.max_outage_s,
            loop=inference.thread.loop,
            notices=run.peers,
        )
    )


def watch_records(run: OpenRun, num_waiting: Callable[[], int]) -> None:
    """From now on too few tokens trained end a run on records; ``num_waiting`` of the batch are
    still to be trained."""
    run.opened.enter_context(
        Watchdog(
            run.config.watchdog,
            run.tokens,
            lambda: f"{num_waiting()} records wait for the trainer",
            lambda: run.signals.end(STUCK, UNWIND_S),
            notices=run.peers,
        )
    )
