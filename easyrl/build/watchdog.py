"""The watchdog, which ends a run that makes no progress."""

from __future__ import annotations

from easyrl.build.inference import Inference
from easyrl.build.run import OpenRun
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.runtime.watchdog import STUCK, UNWIND_S, Watchdog


def watch_progress(run: OpenRun, inference: Inference, rollouts: JournalledRollouts) -> None:
    """From now on too few tokens end the run."""

    def describe() -> str:
        endpoints = "\n".join(map(str, inference.pool.states()))
        return f"{rollouts.num_waiting} finished groups wait for the trainer\n{endpoints}"

    run.opened.enter_context(
        Watchdog(
            run.config.watchdog,
            run.tokens,
            describe,
            lambda: run.signals.end(STUCK, UNWIND_S),
            in_outage=lambda: inference.pool.in_outage,
            max_outage_s=run.config.inference.max_outage_s,
            loop=inference.thread.loop,
            notices=run.peers,
        )
    )
