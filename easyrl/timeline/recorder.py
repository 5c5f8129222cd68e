"""Keeps the spans of one process in memory, and writes those of each batch beside the next one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field

from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import (
    BatchSpans,
    Span,
    endpoint_lane,
    environment_lane,
    is_essential,
    models_lane,
    producer_lane,
    rank_lane,
)
from easyrl.timeline.thinning import Recorded, ThinnedSpans

logger = logging.getLogger(__name__)

FIRST_PHASE = "begin"  # of a batch, on the trainer's thread
# Of a batch, beside its essential ones, 200 bytes each: a run of hours with one open batch must not
# fill the memory.
MOST_SPANS = 200_000


@dataclass
class SpanRecorder:
    """A rank's. Any thread adds spans; the trainer's thread says its phases.

    A run does not depend on it: where a file cannot be written it goes on, and says so once. The
    processor's seconds of writing, beside the run's own work, are in ``writing_s``.
    """

    folder: TimelineFolder
    _: KW_ONLY
    keep: int  # batches
    batch: Callable[[], int]  # number of the open one
    rank: int = 0  # data-parallel
    # told of each batch that is over, in the writing thread
    on_batch: Callable[[BatchSpans], object] = lambda spans: None
    # has those tell who know of spans of the open batch and have not told them yet
    before_end: Callable[[], object] = lambda: None
    writing_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._essential: list[Recorded] = []  # of the open batch
        self._others = ThinnedSpans(MOST_SPANS)
        self._lane = rank_lane(self.rank)
        self._epoch_s = time.time() - time.monotonic()
        self._began_s = time.monotonic()  # the open batch
        self._open: int | None = None  # its number; None: the first has not begun
        self._phase_end_s = self._began_s  # of the last phase
        self._told = self._has_written = False
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="timeline")

    def phase(self, name: str, start_s: float, end_s: float, args: Mapping[str, int | str]) -> None:
        """What the trainer's thread has done. Phases come in order, without gaps.

        The first one of a batch ends the batch before; others interrupt it.
        """
        if name == FIRST_PHASE and self._open != (batch := self.batch()):
            self._end_batch(start_s)
            self._open = batch
        self._phase_end_s = end_s
        self._add(Recorded(self._lane, name, start_s, end_s, args))

    def model(self, name: str, start_s: float, end_s: float) -> None:
        """That a model of this rank has run forward or backward."""
        self._add(Recorded(models_lane(self.rank), name, start_s, end_s, {}))

    def endpoint(
        self, url: str, name: str, start_s: float, end_s: float, **args: int | str
    ) -> None:
        """What an endpoint has done for this rank."""
        self._add(Recorded(endpoint_lane(url), name, start_s, end_s, args))

    def producer(self, name: str, start_s: float, end_s: float, **args: int | str) -> None:
        """What this rank's producer has done."""
        self._add(Recorded(producer_lane(self.rank), name, start_s, end_s, args))

    def environment(
        self, environment: str, name: str, start_s: float, end_s: float, **args: int | str
    ) -> None:
        """What an environment has done for this rank."""
        self._add(Recorded(environment_lane(environment), name, start_s, end_s, args))

    def close(self) -> None:
        """Writes the open batch, up to its last phase, and waits until all is written."""
        self._end_batch(self._phase_end_s)
        self._writer.shutdown()

    def _add(self, span: Recorded) -> None:
        with self._lock:
            if is_essential(span.lane, span.name):
                self._essential.append(span)
            else:
                self._others.add(span)

    def _end_batch(self, now_s: float) -> None:
        self.before_end()
        if self._open is None:  # what comes before the first batch is told with it
            self._began_s = now_s
            return
        with self._lock:
            essential, self._essential = self._essential, []
            others, self._others = self._others, ThinnedSpans(MOST_SPANS)
        began_s, self._began_s = self._began_s, now_s
        left_out = others.num_left_out
        if left_out:
            logger.warning(
                "timeline: batch %d has more than %d spans of requests, rewards and groups; %d of "
                "them are left out, evenly, and its account says so",
                self._open,
                MOST_SPANS,
                left_out,
            )
        recorded = [*essential, *others]
        self._writer.submit(self._write, self._open, began_s, now_s, recorded, left_out)

    def _write(
        self, batch: int, start_s: float, end_s: float, recorded: list[Recorded], left_out: int
    ) -> None:
        start, epoch_s = time.thread_time(), self._epoch_s
        spans = [
            Span(lane, name, began_s + epoch_s, ended_s + epoch_s, dict(args))
            for lane, name, began_s, ended_s, args in recorded
        ]
        whole = BatchSpans(batch, self.rank, start_s + epoch_s, end_s + epoch_s, spans, left_out)
        try:
            self.folder.write(whole)
            self.on_batch(whole)
            if self._has_written:
                self.folder.remove(batch - self.keep, self.rank)
            else:  # what a run before has left, too
                self.folder.remove_up_to(batch - self.keep, self.rank)
            self._has_written = True
        except OSError as error:
            if not self._told:
                logger.warning(
                    "%s: the timeline cannot be written (%s); the run goes on without it",
                    self.folder.path,
                    error.strerror,
                )
            self._told = True
        self.writing_s += time.thread_time() - start
