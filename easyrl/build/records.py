"""The parts of a run on records: the trainer's own, without endpoints, producer and journal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from easyrl.build.accumulation import build_accumulator
from easyrl.build.checkpoints import open_checkpoints, resumed_progress
from easyrl.build.ledger import open_certificate, open_earlier_run, reference_identity
from easyrl.build.model import load_model
from easyrl.build.progress import ProgressView
from easyrl.build.recipe import group_functions
from easyrl.build.record_data import load_dataset
from easyrl.build.run import OpenRun, open_run
from easyrl.build.run_length import tell_run
from easyrl.build.steps import num_epochs
from easyrl.build.timeline import open_timeline
from easyrl.build.trackers import open_trackers
from easyrl.build.watchdog import watch_records
from easyrl.build.weights_digest import digest_of_weights
from easyrl.config.records import RecordsConfig
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.dataloaders.supervised.batches import RecordBatches, group_of
from easyrl.dataloaders.supervised.dataset import RecordDataset
from easyrl.engines.base import TrainEngine
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.supervised import RecordsLedger
from easyrl.metrics.reporter import StepReporter
from easyrl.recipes.loading import load_recipe, run_settings
from easyrl.recipes.trial import try_recipe
from easyrl.runtime.collectives import on_rank_zero
from easyrl.runtime.determinism import remember_arithmetic
from easyrl.runtime.phase_memory import PhaseMemory
from easyrl.runtime.run_folder import keep_config
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.start_phases import StartPhases
from easyrl.schema import Confirmation, PolicyVersion, Published, ServedWeights
from easyrl.trainer.held_out_loss import HeldOutLoss
from easyrl.trainer.loop import Trainer


@dataclass(frozen=True)
class TrainingRecords:
    """What the run is about."""

    data: RecordDataset
    held_out: RecordDataset | None  # of the evaluation
    order: PromptOrder


class NotPublished:
    """A ``Publisher`` of a run that nobody samples for: the weights stay where they are."""

    confirmations: tuple[Confirmation, ...] = ()

    def publish(
        self,
        version: PolicyVersion,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        canary_follows: bool = False,
    ) -> Published:
        meanwhile()
        return Published(ServedWeights(version, ""), {})

    def settle(self, published: Published) -> Published:
        return published


def build_record_parts(
    config: RecordsConfig,
    opened: ExitStack,
    starting: StartPhases,
    *,
    resume: bool,
    signals: RunSignals,
    on_folder: Callable[[], object],
    seal_key: SealKey | None,
) -> tuple[Trainer, TrainEngine]:
    """As ``build_parts``, for a run on records."""
    run = open_run(config, opened, signals, resume=resume, on_folder=on_folder)
    assert isinstance(run.config, RecordsConfig)
    config = run.config
    starting.begin("data")
    records = _read_records(run, config)
    order = records.order
    earlier = open_earlier_run(run, order) if resume else None
    starting.begin("model")
    model = load_model(run, len(records.data.records), earlier)
    engine = model.engine
    checkpoints = open_checkpoints(run, engine)
    reference = reference_identity(config, run.collectives)
    progress = resumed_progress(run, checkpoints, order, reference, model.resume_at_most)
    starting.end()

    # From here on the folder is written: whatever could be refused has been.
    certificate = open_certificate(run, order, progress, earlier, seal_key)
    if run.ranks.is_first:
        keep_config(config, run.output, run.version.attempt)
        remember_arithmetic(config, run.output)
        tell_run(config, len(records.data.records), model.num_steps, progress)
    ranks = run.ranks
    batches = RecordBatches(
        records.data.records, order, config.trainer.batch_size, ranks.dp_rank, ranks.dp_size
    )
    timeline = open_timeline(run, progress)
    timeline.record_models(engine)
    memory = PhaseMemory(engine.device)
    opened.callback(memory.close)
    clock = timeline.clock(memory.end_of_phase)
    look = ProgressView(clock, progress, batches, checkpoints)
    trackers = open_trackers(run, certificate, progress, model.num_steps, look)
    evaluation = None
    if config.evaluation is not None and records.held_out is not None:
        held_out = [group_of(record, record.prompt) for record in records.held_out.records]
        evaluation = HeldOutLoss(
            config.evaluation,
            held_out,
            engine,
            run.collectives,
            group_functions(config),
            run.signals.stop,
            from_step=max(progress.reported_step, 0),
        )
    trainer = Trainer(
        rollouts=batches,
        accumulator=build_accumulator(
            config,
            engine,
            run.collectives,
            run.signals.stop,
            record=run.record,
            synchronous=False,
            clock=clock,
        ),
        weight_sync=NotPublished(),
        ledger=RecordsLedger(
            certificate,
            checkpoints,
            order,
            run.collectives,
            every_steps=config.checkpoint.every_steps,
            step=progress.step,
            reference=reference,
            final_weights=lambda: digest_of_weights(engine, run.collectives),
        ),
        reporter=StepReporter(
            lambda: ranks.world_size,
            seconds=timeline.seconds(),
            known=timeline.metrics,
            trackers=trackers,
        ),
        evaluation=evaluation,
        memory=memory,
        first_version=run.version,
        groups_per_update=config.trainer.batch_size,
        max_steps=config.trainer.max_steps,
        max_bad_steps=config.trainer.max_bad_steps,
        num_prompts=len(order.dataset),
        progress=progress,
    )
    watch_records(run, lambda: batches.num_waiting)
    return trainer, engine


def _read_records(run: OpenRun, config: RecordsConfig) -> TrainingRecords:
    """Reads the records and tries a user's recipe on the first one. Collective.

    Raises ``ConfigError`` for what cannot be used.
    """
    evaluation = config.evaluation
    data = load_dataset(config, config.data, "data")
    held_out = None
    if evaluation is not None:
        held_out = load_dataset(config, evaluation.data, "evaluation.data")
    if config.recipe.file is not None:
        file, first = config.recipe.file, data.records[0]
        group, pack = group_of(first, first.prompt), group_functions(config).pack
        recipe, settings = load_recipe(config), run_settings(config)
        on_rank_zero(run.collectives, lambda: try_recipe(recipe, file, settings, group, pack))
    order = PromptOrder(
        data.prompts,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=num_epochs(config),
        dataset_hash=data.digest,
    )
    return TrainingRecords(data, held_out, order)
