"""The timeline of a run: who adds to it, what is told of it, and the trace left at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from easyrl.build.inference import Inference
from easyrl.build.run import OpenRun
from easyrl.config import Config
from easyrl.engines.base import TrainEngine
from easyrl.runtime.phase_clock import OnInterval, PhaseClock
from easyrl.schema import Progress
from easyrl.simulation.advice import advice_of_run
from easyrl.timeline.accounts_file import AccountsFile
from easyrl.timeline.chrome_trace import FILE, newest_batches, write_trace
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.recorder import SpanRecorder
from easyrl.timeline.spans import BatchSpans, whole_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeline:
    """Of one rank; without a recorder nothing is kept."""

    recorder: SpanRecorder | None = None
    accounts: AccountsFile | None = None  # on the first rank

    def clock(self, *on_interval: OnInterval) -> PhaseClock:
        """Of the trainer's thread, whose phases are recorded; ``on_interval`` hear of them too."""
        own = [] if self.recorder is None else [self.recorder.phase]
        return PhaseClock(*own, *on_interval)

    def record_models(self, engine: TrainEngine) -> None:
        """Has the models tell when they run, from now on."""
        if self.recorder is not None:
            engine.spans.on_span = self.recorder.model
            self.recorder.before_end = engine.spans.tell

    def record(self, inference: Inference) -> None:
        """Has endpoints and producer tell what they do from now on."""
        if self.recorder is not None:
            inference.pool.span = self.recorder.endpoint
            inference.span = self.recorder.producer
            if inference.episodes is not None:
                inference.episodes.span = self.recorder.environment

    def seconds(self) -> Mapping[str, Callable[[], float]]:
        """What it takes, for ``StepReporter.seconds``."""
        recorder = self.recorder
        return {} if recorder is None else {"time/timeline_s": lambda: recorder.writing_s}

    def metrics(self) -> Mapping[str, float]:
        """Of the newest batch that is accounted for."""
        return {} if self.accounts is None else self.accounts.metrics()


def open_timeline(run: OpenRun, progress: Progress) -> Timeline:
    """This rank's, which goes on after ``progress``.

    What an earlier attempt has written behind that will come again. When the run ends the first
    rank writes ``trace.json`` of the newest batches, as far as the others have written theirs, and
    says what would make a batch shorter.
    """
    keep, rank, folder = run.config.timeline.keep, run.ranks.dp_rank, TimelineFolder(run.output)
    if not keep:
        return Timeline()
    accounts: AccountsFile | None = None
    try:
        folder.remove_from(progress.closed_batches, rank)
        if run.ranks.is_first:
            accounts = AccountsFile(folder, run.ranks.dp_size, progress.closed_batches)
    except OSError as error:
        logger.warning(
            "%s: an earlier attempt's timeline cannot be removed (%s); batches from %d on are not "
            "of this run until it comes to them",
            folder.path,
            error.strerror,
            progress.closed_batches,
        )
    recorder = SpanRecorder(folder, keep=keep, batch=lambda: progress.closed_batches, rank=rank)
    if accounts is not None:
        recorder.on_batch = accounts.add
    if run.ranks.is_first:
        run.opened.callback(_end, folder, accounts, run.config)
    run.opened.callback(recorder.close)
    return Timeline(recorder, accounts)


def _end(folder: TimelineFolder, accounts: AccountsFile | None, config: Config) -> None:
    path = folder.path.with_name(FILE)
    try:
        if accounts is not None:
            accounts.close()
        batches = newest_batches(folder)
        if batches:
            write_trace(path, batches)
    except OSError as error:
        logger.warning("%s: cannot be written (%s); easyrl trace can", path, error.strerror)
        return
    whole = whole_batches(batches)
    if whole and config.source == "rollouts":  # records have no inference to compare with
        _advise(whole, path.parent, config)


def _advise(batches: Sequence[BatchSpans], run_dir: Path, config: Config) -> None:
    """Says what would make a batch shorter. What fails here is not a run that has failed."""
    try:
        told = advice_of_run(batches, config)
    except Exception:  # whatever a simulation of unforeseen times may raise
        logger.warning("there is no advice on the run's time", exc_info=True)
        return
    print(f"easyrl: {told} (easyrl trace {run_dir})", file=sys.stderr)
