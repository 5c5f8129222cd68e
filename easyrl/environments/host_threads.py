"""The threads of a host's event loop, for ``asyncio.to_thread``: calls that hang are counted.

Loaded by its path, as ``host`` is run; imports the standard library alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST_THREADS = 256  # asyncio's own pool has a few for each core: as many hung calls would fill it


class HostThreads(ThreadPoolExecutor):
    """A thread more while all are busy. A call that nobody waits for any more, and that goes on,
    hangs: a thread cannot be ended."""

    def __init__(self) -> None:
        super().__init__(MOST_THREADS, "to_thread")
        self.num_hung = 0
        self._changing = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        has_ended = hangs = False

        def call() -> Any:
            nonlocal has_ended
            try:
                return function(*args, **kwargs)
            finally:
                with self._changing:
                    has_ended = True
                    self.num_hung -= hangs

        def cancel() -> bool:
            nonlocal hangs
            was_waiting = whole_cancel()
            with self._changing:
                if not was_waiting and not has_ended and not hangs:
                    hangs = True
                    self.num_hung += 1
            return was_waiting

        future = super().submit(call)
        whole_cancel = future.cancel
        future.cancel = cancel  # type: ignore[method-assign]  # asyncio's, when its waiter is gone
        return future
