"""Held-out evaluation beside the batches of a run."""

from __future__ import annotations

from easyrl.build.data import TrainingData
from easyrl.build.inference import LAST, Inference
from easyrl.build.run import OpenRun
from easyrl.inference_client.pool.idle_room import IdleRoom
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.metrics.event_log import ignore
from easyrl.trainer.evaluation import ScheduledEvaluation

# Of the endpoints' places, those that a batch and the evaluation beside it may take together until
# all of its groups are decided: its tail. Elsewhere each further sequence would slow it down, or
# come before a replacement in a server's own queue (docs/benchmarks.md).
SHARE = 1 / 8


def schedule_evaluation(
    run: OpenRun,
    data: TrainingData,
    inference: Inference,
    rollouts: JournalledRollouts,
    *,
    from_step: int,
) -> ScheduledEvaluation | None:
    """In the room that the batches of ``rollouts`` leave; None where nothing is to be evaluated."""
    if run.config.evaluation is None:
        return None
    num_generations = run.config.rollout.num_generations
    pool = inference.pool
    room = IdleRoom(
        lambda: SHARE * pool.capacity(in_batch=True),
        lambda: num_generations * rollouts.num_undecided,
        lambda: pool.is_wanted(before=LAST),
    )
    evaluator = inference.evaluator(
        run.config.evaluation,
        data.held_out,
        run.collectives,
        run.signals.stop,
        run.tokens.counting(ignore),
        room,
    )
    evaluation = ScheduledEvaluation(evaluator, max(from_step, 0))

    def look() -> None:
        if rollouts.num_undecided == 0:
            pool.limits.lift()
        room.look()

    rollouts.on_decision = look
    rollouts.on_doubt = evaluation.withdraw
    return evaluation
