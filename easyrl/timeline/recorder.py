"""Keeps the spans of one process in memory, and writes those of each batch beside the next one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import (
    BatchSpans,
    Span,
    endpoint_lane,
    environment_lane,
    models_lane,
    producer_lane,
    rank_lane,
)

logger = logging.getLogger(__name__)

FIRST_PHASE = "begin"  # of a batch, on the trainer's thread
# Of a batch: a run of hours with one open batch must not fill the memory. 200 bytes each.
MOST_SPANS = 200_000


class _Recorded(NamedTuple):
    lane: str
    name: str
    start_s: float  # of time.monotonic
    end_s: float
    args: Mapping[str, int | str]


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
    num_dropped: int = field(default=0, init=False)  # of the open batch

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._recorded: list[_Recorded] = []
        self._lane = rank_lane(self.rank)
        self._epoch_s = time.time() - time.monotonic()
        self._began_s = time.monotonic()  # the open batch
        self._open: int | None = None  # its number; None: the first has not begun
        self._phase_end_s = self._began_s  # of the last phase
        self._told = False
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="timeline")

    def phase(self, name: str, start_s: float, end_s: float, args: Mapping[str, int | str]) -> None:
        """What the trainer's thread has done. Phases come in order, without gaps.

        The first one of a batch ends the batch before; others interrupt it.
        """
        if name == FIRST_PHASE and self._open != (batch := self.batch()):
            self._end_batch(start_s)
            self._open = batch
        self._phase_end_s = end_s
        self._add(_Recorded(self._lane, name, start_s, end_s, args))

    def model(self, name: str, start_s: float, end_s: float) -> None:
        """That a model of this rank has run forward or backward."""
        self._add(_Recorded(models_lane(self.rank), name, start_s, end_s, {}))

    def endpoint(
        self, url: str, name: str, start_s: float, end_s: float, **args: int | str
    ) -> None:
        """What an endpoint has done for this rank."""
        self._add(_Recorded(endpoint_lane(url), name, start_s, end_s, args))

    def producer(self, name: str, start_s: float, end_s: float, **args: int | str) -> None:
        """What this rank's producer has done."""
        self._add(_Recorded(producer_lane(self.rank), name, start_s, end_s, args))

    def environment(
        self, environment: str, name: str, start_s: float, end_s: float, **args: int | str
    ) -> None:
        """What an environment has done for this rank."""
        self._add(_Recorded(environment_lane(environment), name, start_s, end_s, args))

    def close(self) -> None:
        """Writes the open batch, up to its last phase, and waits until all is written."""
        self._end_batch(self._phase_end_s)
        self._writer.shutdown()

    def _add(self, recorded: _Recorded) -> None:
        with self._lock:
            if len(self._recorded) < MOST_SPANS:
                self._recorded.append(recorded)
            else:
                self.num_dropped += 1

    def _end_batch(self, now_s: float) -> None:
        self.before_end()
        if self._open is None:  # what comes before the first batch is told with it
            self._began_s = now_s
            return
        with self._lock:
            recorded, self._recorded = self._recorded, []
            dropped, self.num_dropped = self.num_dropped, 0
        began_s, self._began_s = self._began_s, now_s
        if dropped:
            logger.warning(
                "timeline: batch %d has more than %d spans; %d are left out",
                self._open,
                MOST_SPANS,
                dropped,
            )
        self._writer.submit(self._write, self._open, began_s, now_s, recorded)

    def _write(self, batch: int, start_s: float, end_s: float, recorded: list[_Recorded]) -> None:
        start, epoch_s = time.thread_time(), self._epoch_s
        spans = [
            Span(lane, name, began_s + epoch_s, ended_s + epoch_s, dict(args))
            for lane, name, began_s, ended_s, args in recorded
        ]
        whole = BatchSpans(batch, self.rank, start_s + epoch_s, end_s + epoch_s, spans)
        try:
            self.folder.write(whole)
            self.on_batch(whole)
            self.folder.remove_up_to(batch - self.keep, self.rank)
        except OSError as error:
            if not self._told:
                logger.warning(
                    "%s: the timeline cannot be written (%s); the run goes on without it",
                    self.folder.path,
                    error.strerror,
                )
            self._told = True
        self.writing_s += time.thread_time() - start
