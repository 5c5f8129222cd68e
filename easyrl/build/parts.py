"""All parts of a run: data first, then the model, then the endpoints; what fails cheaply first."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from easyrl.build.checkpoints import open_kept_state
from easyrl.build.cores import share_cores
from easyrl.build.data import read_data
from easyrl.build.endpoints import follow_membership, open_endpoints
from easyrl.build.evaluation import schedule_evaluation
from easyrl.build.inference import open_scoring
from easyrl.build.ledger import open_certificate, open_earlier_run
from easyrl.build.model import load_model
from easyrl.build.progress import ProgressView
from easyrl.build.records import build_record_parts
from easyrl.build.reporter import open_reporter
from easyrl.build.rollouts import open_rollouts
from easyrl.build.run import open_run
from easyrl.build.run_length import tell_run
from easyrl.build.servers import start_servers
from easyrl.build.timeline import open_timeline
from easyrl.build.trainer import build_trainer
from easyrl.build.watchdog import watch_progress
from easyrl.config import Config
from easyrl.config.records import RecordsConfig
from easyrl.engines.base import TrainEngine
from easyrl.ledger.certificate.seal import SealKey
from easyrl.runtime.determinism import remember_arithmetic
from easyrl.runtime.phase_memory import PhaseMemory
from easyrl.runtime.run_folder import keep_config
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.start_phases import StartPhases
from easyrl.trainer.loop import Trainer


def build_parts(
    config: Config,
    opened: ExitStack,
    *,
    resume: bool,
    signals: RunSignals,
    on_folder: Callable[[], object] = lambda: None,
    seal_key: SealKey | None = None,
) -> tuple[Trainer, TrainEngine]:
    """The trainer and its model; ``opened`` closes what was opened, in reverse order.

    ``on_folder`` is called once the run's folder is this process's; ``seal_key``: on the first
    rank, for the certificate. Raises ``ConfigError`` for what cannot be used, ``RunComplete`` where
    nothing is left to do.
    """
    starting = StartPhases(is_told=os.environ.get("RANK", "0") == "0")
    opened.callback(starting.abandon)
    starting.begin("processes and folder")
    if isinstance(config, RecordsConfig):
        return build_record_parts(
            config,
            opened,
            starting,
            resume=resume,
            signals=signals,
            on_folder=on_folder,
            seal_key=seal_key,
        )
    run = open_run(config, opened, signals, resume=resume, on_folder=on_folder)
    config = run.config
    starting.begin("data")
    scoring = open_scoring(config, opened)  # its processes start while the data is read
    data = read_data(run, scoring)
    earlier = open_earlier_run(run, data.order) if resume else None
    cores = share_cores(config, opened)
    log_dir = run.output / "servers"
    servers = start_servers(config, opened, log_dir, cores)  # up when the model is loaded
    starting.begin("model")
    model = load_model(run, len(data.prompts), earlier)
    model.engine.spans.before = cores.adjust  # a server may have ended since the micro-batch began
    kept = open_kept_state(run, data, model)
    starting.begin("endpoints")
    endpoints = open_endpoints(run, scoring, data, model.engine, servers, cores)
    starting.end()

    # From here on the folder is written: whatever could be refused has been.
    certificate = open_certificate(run, data.order, kept.progress, earlier, seal_key)
    if run.ranks.is_first:
        keep_config(config, run.output, run.version.attempt)
        remember_arithmetic(config, run.output)
        tell_run(config, len(data.prompts), model.num_steps, kept.progress)
    follow_membership(run, endpoints)
    timeline = open_timeline(run, kept.progress)
    timeline.record(endpoints.inference)
    timeline.record_models(model.engine)
    rollouts = open_rollouts(run, data, endpoints, kept.journal)
    evaluation = schedule_evaluation(
        run, data, endpoints.inference, rollouts, from_step=kept.progress.reported_step
    )
    memory = PhaseMemory(model.engine.device)
    opened.callback(memory.close)
    clock = timeline.clock(memory.end_of_phase)
    reporter = open_reporter(
        run,
        endpoints.inference,
        certificate,
        timeline,
        progress=kept.progress,
        num_steps=model.num_steps,
        look=ProgressView(
            clock,
            kept.progress,
            rollouts,
            kept.checkpoints,
            config.trainer.updates_per_batch,
            endpoints.inference,
            evaluation,
        ),
    )
    trainer = build_trainer(
        run,
        model.engine,
        kept,
        data.order,
        certificate,
        rollouts,
        endpoints.weight_sync,
        endpoints.inference.pool,
        reporter,
        evaluation,
        cores,
        clock,
        memory,
    )
    watch_progress(run, endpoints.inference, rollouts)
    return trainer, model.engine
