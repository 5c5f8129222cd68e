"""A tracker whose failures do not end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from easyrl.metrics.trackers.base import Tracker, TrackerNotInstalled

logger = logging.getLogger(__name__)


class OptionalTracker:
    """A tracker whose failures are told of, each once, and end nothing; called ``name`` there.

    Raises ``TrackerNotInstalled``: that a person can mend before anything is trained.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name = name
        self._told: set[str] = set()
        self._tracker: Tracker | None = None
        with self._tolerant():
            self._tracker = open_tracker()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._tolerant():
            if self._tracker is not None:
                self._tracker.log(step, metrics)

    def note(self, name: str, text: str) -> None:
        with self._tolerant():
            if self._tracker is not None:
                self._tracker.note(name, text)

    def close(self) -> None:
        with self._tolerant():
            if self._tracker is not None:
                self._tracker.close()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except TrackerNotInstalled:
            raise
        except Exception as error:  # of whatever library
            problem = f"{type(error).__name__}: {error}"
            if problem not in self._told:
                logger.warning("%s: %s; the run goes on without it", self._name, problem)
            self._told.add(problem)
