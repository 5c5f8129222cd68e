"""The trackers that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from easyrl.build.run import OpenRun
from easyrl.build.samples import console_sample, wandb_table
from easyrl.config import Config
from easyrl.config.file import public_tree
from easyrl.ledger.certificate.writer import Certificate
from easyrl.metrics.console import COLUMNS, RECORD_COLUMNS, ConsoleView, named_columns, with_sets
from easyrl.metrics.renamed import RenamedTracker
from easyrl.metrics.step_progress import StepProgress
from easyrl.metrics.trackers.background import BackgroundTracker
from easyrl.metrics.trackers.base import Tracker
from easyrl.metrics.trackers.ending import RunEnding
from easyrl.metrics.trackers.jsonl import JsonlTracker
from easyrl.metrics.trackers.mlflow import MlflowTracker
from easyrl.metrics.trackers.optional import OptionalTracker
from easyrl.metrics.trackers.prometheus import PrometheusTracker
from easyrl.metrics.trackers.state import ContinuedTracker, TrackerState
from easyrl.metrics.trackers.swanlab import SwanlabTracker
from easyrl.metrics.trackers.tensorboard import TensorBoardTracker
from easyrl.metrics.trackers.trackio import TrackioTracker
from easyrl.metrics.trackers.wandb import WandbTracker
from easyrl.runtime.run_files import METRICS_FILE
from easyrl.schema import Progress

# that are given the configuration
SERVICES = {"wandb", "trackio", "mlflow", "swanlab"}


def open_trackers(
    run: OpenRun,
    certificate: Certificate | None,
    progress: Progress,
    num_steps: int | None,
    look: Callable[[], StepProgress],
) -> list[Tracker]:
    """On the first rank; figures go on after ``progress``.

    The trackers are told the ``certificate``'s hash last. ``look``: where the open step is.
    """
    trackers: list[Tracker] = []
    ending = RunEnding()
    if run.ranks.is_first:
        trackers = trackers_of(run.config, run.output, progress, num_steps, look, ending)
    for tracker in trackers:
        run.opened.callback(tracker.close)
    run.opened.push(ending.take)  # before they are closed
    if certificate is not None:
        run.opened.callback(_publish_chain, certificate, trackers)
    return trackers


def trackers_of(
    config: Config,
    output: Path,
    progress: Progress,
    total_steps: int | None,
    look: Callable[[], StepProgress],
    ending: RunEnding,
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

    def add_continued(name: str, open_tracker: Callable[[TrackerState], Tracker]) -> None:
        """Of one that cannot take back the steps that a resumed run takes again."""

        add(name, lambda: continued(TrackerState(output, name), open_tracker))

    def add_in_background(name: str, open_tracker: Callable[[TrackerState], Tracker]) -> None:
        """Of such a one that waits for its service's answer: a step counts as told behind it."""

        def opened() -> Tracker:
            state = TrackerState(output, name)
            return BackgroundTracker(continued(state, open_tracker), left_out=state.missed)

        add(name, opened)

    def continued(state: TrackerState, open_tracker: Callable[[TrackerState], Tracker]) -> Tracker:
        return ContinuedTracker(RenamedTracker(open_tracker(state), names), state)

    if run.trackers:
        add_renamed("tensorboard", lambda: TensorBoardTracker(output / "tensorboard", from_step))
    tree = public_tree(config) if SERVICES & set(run.trackers) else {}
    if "wandb" in run.trackers:
        table, project = wandb_table(config, output, from_step), run.wandb_project or run.project
        add_continued(
            "wandb", lambda s: WandbTracker(project, run.name, output, tree, s, ending, table)
        )
    if "trackio" in run.trackers:
        add_continued("trackio", lambda s: TrackioTracker(run.project, run.name, tree, s))
    if "mlflow" in run.trackers:
        add_in_background(
            "mlflow", lambda s: MlflowTracker(run.project, run.name, output, tree, s, ending)
        )
    if "swanlab" in run.trackers:
        add_continued(
            "swanlab", lambda s: SwanlabTracker(run.project, run.name, output, tree, s, ending)
        )
    if "prometheus" in run.trackers:
        at = config.metrics.prometheus_host, config.metrics.prometheus_port
        add_renamed("prometheus", lambda: PrometheusTracker(run.name, *at, look))
    if run.console:
        sets = [] if config.evaluation is None else list(filter(None, config.evaluation.sets))
        columns = RECORD_COLUMNS if config.source == "records" else with_sets(COLUMNS, sets)
        columns = named_columns(columns, names)
        sample = console_sample(config, output, from_step)
        add("console", lambda: ConsoleView(total_steps, columns=columns, sample=sample, look=look))
    return trackers


def _publish_chain(certificate: Certificate, trackers: Sequence[Tracker]) -> None:
    """Tells the trackers what the certificate was when the attempt ended, however it did."""
    for tracker in trackers:
        tracker.note("certificate", certificate.chain_hash)
