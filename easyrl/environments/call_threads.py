"""A thread for each call of a tool or reward, so that one that hangs is in nobody's way.

Threads cannot be ended: those of calls that nobody waits for any more are counted, and the process
is replaced where there are many (``hosts``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

MOST_HUNG = 512  # of a process; the host is replaced long before

_lock = threading.Lock()
_num_hung = 0


class ThreadsHang(RuntimeError):
    """Too many calls do not end: the environment's failure, not the model's."""


def num_hung() -> int:
    """Threads of this process whose calls nobody waits for any more, and that go on."""
    return _num_hung


async def in_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` returns, in a thread of its own. Raises ``ThreadsHang``."""
    if _num_hung >= MOST_HUNG:
        raise ThreadsHang(f"{MOST_HUNG} calls hang; bound what they wait for")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    call = _Call()

    def tell(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # SystemExit must end no host
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        call.ended()
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:  # the loop has ended meanwhile
            pass

    threading.Thread(target=run, daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        call.left()
        raise


class _Call:
    """One call: counted from when nobody waits for it any more to its end."""

    def __init__(self) -> None:
        self._has_ended = self._hangs = False

    def left(self) -> None:
        global _num_hung
        with _lock:
            self._hangs = not self._has_ended
            _num_hung += self._hangs

    def ended(self) -> None:
        """In its thread."""
        global _num_hung
        with _lock:
            self._has_ended = True
            _num_hung -= self._hangs
