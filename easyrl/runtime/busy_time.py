"""The time in which at least one of several tasks was running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class BusyTime:
    """Seconds on the clock, not of the tasks: those that run side by side count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._since_s = 0.0  # that one has been running without a gap
        self._seconds = 0.0

    @contextmanager
    def task(self) -> Iterator[None]:
        with self._lock:
            if self._num_running == 0:
                self._since_s = time.monotonic()
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if self._num_running == 0:
                    self._seconds += time.monotonic() - self._since_s

    @property
    def num_running(self) -> int:
        """From any thread."""
        return self._num_running

    def seconds(self) -> float:
        """So far, with those of what is running now. From any thread."""
        with self._lock:
            running_s = time.monotonic() - self._since_s if self._num_running else 0.0
            return self._seconds + running_s
