"""The timeline of a run: who adds to it, and the trace that is left at the end."""

from __future__ import annotations

import logging

from easyrl.build.inference import Inference
from easyrl.build.run import OpenRun
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.schema import Progress
from easyrl.timeline.chrome_trace import FILE, newest_batches, write_trace
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.recorder import SpanRecorder

logger = logging.getLogger(__name__)


def open_timeline(run: OpenRun, progress: Progress) -> SpanRecorder | None:
    """This rank's, which goes on after ``progress``; None where nothing is to be kept.

    What an earlier attempt has written behind that will come again. When the run ends the first
    rank writes ``trace.json`` of the newest batches, as far as the others have written theirs.
    """
    keep, rank, folder = run.config.timeline.keep, run.ranks.dp_rank, TimelineFolder(run.output)
    if not keep:
        return None
    try:
        folder.remove_from(progress.closed_batches, rank)
    except OSError as error:
        logger.warning(
            "%s: an earlier attempt's timeline cannot be removed (%s); batches from %d on are not "
            "of this run until it comes to them",
            folder.path,
            error.strerror,
            progress.closed_batches,
        )
    recorder = SpanRecorder(folder, keep=keep, batch=lambda: progress.closed_batches, rank=rank)
    if run.ranks.is_first:
        run.opened.callback(_write_trace, folder)
    run.opened.callback(recorder.close)
    return recorder


def phase_clock(recorder: SpanRecorder | None) -> PhaseClock:
    """Of the trainer's thread, whose phases ``recorder`` is told."""
    return PhaseClock(None if recorder is None else recorder.phase)


def record_inference(recorder: SpanRecorder | None, inference: Inference) -> None:
    """Has endpoints and producer tell ``recorder`` what they do from now on."""
    if recorder is not None:
        inference.pool.span = recorder.endpoint
        inference.span = recorder.producer


def _write_trace(folder: TimelineFolder) -> None:
    path = folder.path.with_name(FILE)
    try:
        if batches := newest_batches(folder):
            write_trace(path, batches)
    except OSError as error:
        logger.warning("%s: cannot be written (%s); easyrl trace can", path, error.strerror)
