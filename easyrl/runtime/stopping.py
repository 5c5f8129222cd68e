"""A stop that was asked for: who waits is woken, every rank is told, and it ends in time."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from easyrl.runtime.notices import Notices
from easyrl.runtime.stacks import log_report, thread_stacks
from easyrl.schema import StopRequested

logger = logging.getLogger(__name__)

POLL_S = 0.25
FOLLOWER_END_S = 5.0  # its store may belong to a rank that is gone
NOTICE = "stop"

Wake = Callable[[StopRequested], object]


def end_with_stacks(reason: str) -> None:
    """Logs what every thread does and ends the process with status 1."""
    log_report(lambda: f"{reason}; ending it now\n{thread_stacks()}")
    os._exit(1)


class StopRequest:
    """Somebody may ask this run to save and end; whoever waits long registers to be woken.

    Calls ``give_up`` if the run has not ended ``grace_s`` seconds later.
    """

    def __init__(
        self, grace_s: float, *, give_up: Callable[[str], object] = end_with_stacks
    ) -> None:
        self._grace_s = grace_s
        self._give_up = give_up
        self._reason: str | None = None
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()  # put() is safe in a handler
        self._lock = threading.Lock()  # never taken in a signal handler
        self._wakes: list[Wake] = []
        self._woken: StopRequested | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="easyrl-stop", daemon=True)
        self._thread.start()

    def request(self, reason: str) -> None:
        """Asks for the stop; from any thread, also in a signal handler. Only the first counts."""
        if self._reason is None:
            self._reason = reason
        self._asked.put(None)

    @property
    def requested(self) -> bool:
        return self._reason is not None

    @property
    def error(self) -> StopRequested | None:
        """What a stopping run raises; None while nobody has asked."""
        return None if self._reason is None else StopRequested(self._reason)

    def raise_if_requested(self) -> None:
        if (error := self.error) is not None:
            raise error

    @contextmanager
    def wakes(self, callback: Wake) -> Iterator[None]:
        """Inside, ``callback(StopRequested)`` is called once if there is a request, or was one.

        From a thread of its own; it must not wait.
        """
        with self._lock:
            self._wakes.append(callback)
            if self._woken is not None:
                callback(self._woken)
        try:
            yield
        finally:
            with self._lock:
                self._wakes.remove(callback)

    @contextmanager
    def follows_peers(self, notices: Notices) -> Iterator[None]:
        """Inside, a rank that is asked tells the others, which stop with it.

        To be left before the process ends, which is aborted with a thread inside the store.
        """
        left = threading.Event()
        follower = threading.Thread(
            target=self._follow, args=(notices, left), name="easyrl-stop-peers", daemon=True
        )
        if notices.has_readers:
            follower.start()
        try:
            yield
        finally:
            left.set()
            if follower.is_alive():
                follower.join(FOLLOWER_END_S)

    def close(self) -> None:
        """The run has ended, or nobody watches its end any more. Safe to call twice."""
        self._closed.set()
        self._asked.put(None)
        self._thread.join()

    def _follow(self, notices: Notices, left: threading.Event) -> None:
        while self._reason is None and not left.wait(POLL_S):
            if (told := notices.read(NOTICE)) is not None:
                self.request(told)
                return
        if self._reason is not None:
            notices.post(NOTICE, self._reason)

    def _serve(self) -> None:
        self._asked.get()
        if self._reason is None:
            return  # closed
        logger.warning(
            "stopping (%s): a checkpoint is written, within %g s", self._reason, self._grace_s
        )
        with self._lock:
            self._woken = StopRequested(self._reason)
            for callback in self._wakes:
                try:
                    callback(self._woken)
                except Exception:  # the others still have to be woken
                    logger.exception("a part of the run could not be woken for the stop")
        if not self._closed.wait(self._grace_s):
            self._give_up(
                f"the run has not ended {self._grace_s:g} s after the request to stop "
                "(trainer.grace_s); --resume goes on from its last checkpoint"
            )
