"""One piece of work at a time, in a thread or at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs work in a daemon thread; what it raises is raised by the next ``wait``.

    With ``enabled=False`` the work is done before ``start`` returns.
    """

    def __init__(self, name: str, *, enabled: bool) -> None:
        self._name = name
        self._enabled = enabled
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins ``work``; nothing else may be running."""
        assert self._thread is None and self._error is None, "wait for the work before"
        if not self._enabled:
            work()
            return
        self._thread = threading.Thread(
            target=self._run, args=(work,), name=self._name, daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the work is done; whether it is. Raises what it raised, once."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised where somebody can act on it
            self._error = error
