"""A tracker that is told from a thread of its own, so that a slow service delays no step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from easyrl.metrics.trackers.base import Tracker

MOST_WAITING = 1000
CLOSE_S = 30.0  # that the end of a run waits for what is not logged yet


class BackgroundTracker:
    """``tracker``, told in order by a thread.

    What fails there is raised by the next call. Raises ``BufferError`` where the service is too far
    behind, at the end of the run too; what waits is not logged then.

    ``left_out`` is called with a report for which there is no room.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        left_out: Callable[[int, dict[str, float]], object] = lambda step, metrics: None,
        close_s: float = CLOSE_S,
    ) -> None:
        self._tracker, self._left_out, self._close_s = tracker, left_out, close_s
        self._waiting = queue.Queue[Callable[[], None] | None](MOST_WAITING)
        self._problems = queue.SimpleQueue[Exception]()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        told = dict(metrics)  # others are given the same object
        self._put(lambda: self._tracker.log(step, told), if_full=lambda: self._left_out(step, told))

    def note(self, name: str, text: str) -> None:
        self._put(lambda: self._tracker.note(name, text))

    def close(self) -> None:
        """Waits for what was logged, for so long as it may, also where something has failed."""
        if self._thread.is_alive():
            self._queue(self._tracker.close)
            self._queue(None)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                raise BufferError(
                    f"the service has not taken all within {self._close_s:g} s; metrics.jsonl "
                    "has the rest"
                )
        self._raise_problem()

    def _put(self, call: Callable[[], None], if_full: Callable[[], object] = lambda: None) -> None:
        self._queue(call, if_full)
        self._raise_problem()

    def _queue(
        self, call: Callable[[], None] | None, if_full: Callable[[], object] = lambda: None
    ) -> None:
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            if_full()
            raise BufferError(
                f"the service is {MOST_WAITING} reports behind; metrics.jsonl has what is left out"
            ) from None

    def _raise_problem(self) -> None:
        if not self._problems.empty():
            raise self._problems.get()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:  # of whatever library; the next call tells of it
                self._problems.put(error)
