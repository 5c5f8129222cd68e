"""Held-out evaluation beside the batches of a run."""

from __future__ import annotations

from easyrl.build.data import TrainingData
from easyrl.build.inference import LAST, Inference
from easyrl.build.run import OpenRun
from easyrl.inference_client.pool.idle_room import IdleRoom
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.metrics.event_log import ignore
from easyrl.trainer.evaluation import ScheduledEvaluation

# Of all places of the endpoints, those that a batch and the evaluation beside it may take together
# until all of its groups are decided: its tail. Elsewhere each further sequence would slow it down,
# or come before a replacement in a server's own queue (docs/benchmarks.md). Not less than places
# for so many of the batch's groups and held-out prompts: few would never have room for both.
SHARE, FEWEST = 1 / 8, 1


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
    num_samples = max(each.num_samples for each in run.config.evaluation.sets.values())
    pool = inference.pool

    def capacity() -> float:
        tail = max(SHARE * pool.capacity(in_batch=False), FEWEST * (num_generations + num_samples))
        return min(tail, pool.capacity(in_batch=True))

    room = IdleRoom(
        capacity,
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
