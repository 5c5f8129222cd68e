"""The trainer of a run, around the parts that are open by then."""

from __future__ import annotations

from easyrl.build.accumulation import build_accumulator
from easyrl.build.checkpoints import KeptState
from easyrl.build.run import OpenRun
from easyrl.build.samples import open_samples
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.ledger.ledger import Ledger
from easyrl.metrics.logprob_agreement import agreement_limit
from easyrl.metrics.reporter import StepReporter
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.runtime.phase_memory import PhaseMemory
from easyrl.runtime.shared_cores import SharedCores
from easyrl.trainer.alarm_actions import AlarmActions
from easyrl.trainer.loop import Trainer
from easyrl.trainer.parts import Evaluation
from easyrl.weight_sync.publish import WeightSync


def build_trainer(
    run: OpenRun,
    engine: TrainEngine,
    kept: KeptState,
    order: PromptOrder,
    certificate: Certificate | None,
    rollouts: JournalledRollouts,
    weight_sync: WeightSync,
    pool: EndpointPool,
    reporter: StepReporter,
    evaluation: Evaluation | None,
    cores: SharedCores,
    clock: PhaseClock,
    memory: PhaseMemory,
) -> Trainer:
    """Opens nothing."""
    config, progress = run.config, kept.progress
    prunes = run.ranks.is_first and config.journal.keep != "all"
    return Trainer(
        rollouts=rollouts,
        accumulator=build_accumulator(
            config,
            engine,
            run.collectives,
            run.signals.stop,
            record=run.record,
            synchronous=config.run.mode == "sync",
            agreement_limit=agreement_limit(config),
            cores=cores,
            clock=clock,
            on_trained=pool.limits.trained,
            samples_per_step=config.samples.per_step,
        ),
        weight_sync=weight_sync,
        ledger=Ledger(
            certificate,
            kept.checkpoints,
            order,
            run.collectives,
            every_steps=config.checkpoint.every_steps,
            step=progress.step,
            journal=kept.journal if prunes else None,
            reference=kept.reference,
        ),
        reporter=reporter,
        evaluation=evaluation,
        memory=memory,
        samples=open_samples(run, progress),
        alarms=AlarmActions(config.alarms.on_alarm, reporter.alarms, run.collectives),
        first_version=run.version,
        groups_per_update=config.trainer.batch_size // config.trainer.updates_per_batch,
        updates_per_batch=config.trainer.updates_per_batch,
        max_steps=config.trainer.max_steps,
        max_bad_steps=config.trainer.max_bad_steps,
        num_prompts=len(order.dataset),
        progress=progress,
    )
