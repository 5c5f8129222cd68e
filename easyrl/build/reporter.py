"""What is told of each step: held-out evaluation, and the trackers that show the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from easyrl.build.data import TrainingData
from easyrl.build.inference import Inference
from easyrl.build.run import OpenRun
from easyrl.config import Config
from easyrl.config.file import public_tree
from easyrl.ledger.certificate.writer import Certificate
from easyrl.metrics.console import ConsoleView
from easyrl.metrics.event_log import ignore
from easyrl.metrics.logprob_mismatch import LogprobMismatch
from easyrl.metrics.reporter import StepReporter
from easyrl.metrics.trackers import (
    JsonlTracker,
    OptionalTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)
from easyrl.runtime.run_files import METRICS_FILE
from easyrl.trainer.evaluation import ScheduledEvaluation


def open_reporter(
    run: OpenRun,
    data: TrainingData,
    inference: Inference,
    certificate: Certificate | None,
    *,
    from_step: int,
    num_steps: int | None,
) -> StepReporter:
    """Figures go on after ``from_step``; the trackers are told the ``certificate``'s hash last."""
    trackers = []
    evaluation = _scheduled_evaluation(run, data, inference, from_step)
    if run.ranks.is_first:
        trackers = _open_trackers(run.config, run.output, from_step, num_steps)
    for tracker in trackers:
        run.opened.callback(tracker.close)
    if certificate is not None:
        run.opened.callback(_publish_chain, certificate, trackers)
    return StepReporter(
        inference.pool.idle_s,
        run.ranks.world_size + len(inference.pool.endpoints),
        evaluation=evaluation,
        trackers=trackers,
        mismatch=LogprobMismatch(run.config) if run.ranks.is_first else None,
    )


def _scheduled_evaluation(
    run: OpenRun, data: TrainingData, inference: Inference, from_step: int
) -> ScheduledEvaluation | None:
    if run.config.evaluation is None:
        return None
    evaluator = inference.evaluator(
        run.config.evaluation,
        data.held_out,
        run.collectives,
        run.signals.stop,
        run.tokens.counting(ignore),
    )
    return ScheduledEvaluation(evaluator, max(from_step, 0))


def _publish_chain(certificate: Certificate, trackers: Sequence[Tracker]) -> None:
    """Tells the trackers what the certificate was when the attempt ended, however it did."""
    for tracker in trackers:
        tracker.note("certificate", certificate.chain_hash)


def _open_trackers(
    config: Config, output: Path, from_step: int, total_steps: int | None
) -> list[Tracker]:
    """All back ends that the configuration names; their figures go on after ``from_step``.

    A run needs the file; it goes on without what else fails.
    """
    run = config.run
    trackers: list[Tracker] = [JsonlTracker(output / METRICS_FILE, from_step)]

    def add(name: str, open_tracker: Callable[[], Tracker]) -> None:
        trackers.append(OptionalTracker(name, open_tracker))

    if "tensorboard" in run.trackers:
        add("tensorboard", lambda: TensorBoardTracker(output / "tensorboard", from_step))
    if "wandb" in run.trackers:
        tree = public_tree(config)
        add("wandb", lambda: WandbTracker(run.wandb_project, run.name, output, tree))
    if run.console:
        add("console", lambda: ConsoleView(total_steps))
    return trackers
