"""What is told of each step, and the trackers that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from easyrl.build.inference import Inference
from easyrl.build.run import OpenRun
from easyrl.build.samples import console_sample, wandb_table
from easyrl.build.timeline import Timeline
from easyrl.config import Config
from easyrl.config.file import public_tree
from easyrl.ledger.certificate.writer import Certificate
from easyrl.metrics.alarms.alarms import Alarms
from easyrl.metrics.console import COLUMNS, RECORD_COLUMNS, ConsoleView, named_columns
from easyrl.metrics.logprob_mismatch import LogprobMismatch
from easyrl.metrics.renamed import RenamedTracker
from easyrl.metrics.reporter import StepReporter
from easyrl.metrics.step_progress import StepProgress
from easyrl.metrics.trackers import (
    JsonlTracker,
    OptionalTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    read_metrics,
)
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.run_files import METRICS_FILE
from easyrl.schema import Progress


def open_reporter(
    run: OpenRun,
    inference: Inference,
    certificate: Certificate | None,
    timeline: Timeline,
    *,
    progress: Progress,
    num_steps: int | None,
    look: Callable[[], StepProgress],
) -> StepReporter:
    """Figures go on after ``progress``; the trackers are told the ``certificate``'s hash last.

    ``look``: where the open step is, for the console.
    """
    trackers = open_trackers(run, certificate, progress, num_steps, look)
    mismatch: LogprobMismatch | None = None
    alarms: Alarms | None = None
    if run.ranks.is_first:
        mismatch = LogprobMismatch(run.config)
        settings = run.config.alarms
        recipe = load_recipe(run.config)
        if not recipe.compares_responses:  # equal rewards are no missing signal
            settings = settings.model_copy(update={"no_signal": None})
        alarms = Alarms(settings, run.record)
        alarms.add_earlier(read_metrics(run.output / METRICS_FILE))
    return StepReporter(
        run.ranks.world_size + len(inference.pool.endpoints),
        seconds={
            "time/inference_idle_s": inference.pool.idle_s,
            "time/reward_s": inference.rewards_busy.seconds,
            **timeline.seconds(),
        },
        known=timeline.metrics,
        trackers=trackers,
        mismatch=mismatch,
        alarms=alarms,
    )


def open_trackers(
    run: OpenRun,
    certificate: Certificate | None,
    progress: Progress,
    num_steps: int | None,
    look: Callable[[], StepProgress],
) -> list[Tracker]:
    """On the first rank, as for ``open_reporter``."""
    trackers: list[Tracker] = []
    if run.ranks.is_first:
        trackers = _open_trackers(run.config, run.output, progress, num_steps, look)
    for tracker in trackers:
        run.opened.callback(tracker.close)
    if certificate is not None:
        run.opened.callback(_publish_chain, certificate, trackers)
    return trackers


def _publish_chain(certificate: Certificate, trackers: Sequence[Tracker]) -> None:
    """Tells the trackers what the certificate was when the attempt ended, however it did."""
    for tracker in trackers:
        tracker.note("certificate", certificate.chain_hash)


def _open_trackers(
    config: Config,
    output: Path,
    progress: Progress,
    total_steps: int | None,
    look: Callable[[], StepProgress],
) -> list[Tracker]:
    """All back ends that the configuration names; their figures go on after ``progress``.

    A run needs the file; it goes on without what else fails.
    """
    run, from_step, names = config.run, progress.reported_step, config.metrics.names
    trackers: list[Tracker] = [
        JsonlTracker(
            output / METRICS_FILE,
            from_step,
            unevaluated=progress.unevaluated and config.evaluation is not None,
        )
    ]

    def add(name: str, open_tracker: Callable[[], Tracker]) -> None:
        trackers.append(OptionalTracker(name, open_tracker))

    def add_renamed(name: str, open_tracker: Callable[[], Tracker]) -> None:
        add(name, lambda: RenamedTracker(open_tracker(), names))

    if "tensorboard" in run.trackers:
        add_renamed("tensorboard", lambda: TensorBoardTracker(output / "tensorboard", from_step))
    if "wandb" in run.trackers:
        tree = public_tree(config)
        table = wandb_table(config, output, from_step)
        add_renamed("wandb", lambda: WandbTracker(run.wandb_project, run.name, output, tree, table))
    if run.console:
        columns = named_columns(RECORD_COLUMNS if config.source == "records" else COLUMNS, names)
        sample = console_sample(config, output, from_step)
        add("console", lambda: ConsoleView(total_steps, columns=columns, sample=sample, look=look))
    return trackers
