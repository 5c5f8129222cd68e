"""Where every thread and every asyncio task is just now, as text for the log.

Reads no files: a run that hangs on a file system must still be able to say so.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

logger = logging.getLogger(__name__)

LOG_LIMIT_S = 10.0
# Of a coroutine, an asynchronous and a plain generator: prefix of their attributes, what it awaits.
_INNER = {"cr": "await", "ag": "await", "gi": "yieldfrom"}
STDERR = 2  # the descriptor: what replaced sys.stderr may have none


def thread_stacks() -> str:
    """All threads by name with their Python frames, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != here:
            name = names.get(ident, "not started by Python")
            parts.append(f"thread {name} ({ident:#x}):\n" + "\n".join(_frames(frame)))
    return "\n".join(parts)


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks of ``loop``, those that wait at the same place together; from any thread."""
    places = Counter(" > ".join(_awaits(task)) for task in asyncio.all_tasks(loop))
    lines = [f"  {count} x {place}" for place, count in places.most_common()]
    return "\n".join([f"asyncio tasks ({sum(places.values())}):", *lines])


def log_report(describe: Callable[[], str]) -> None:
    """Logs what ``describe`` says and returns after ``LOG_LIMIT_S`` at the latest.

    A hanging run may hang in the log itself: then the stacks go straight to stderr.
    """
    speaker = threading.Thread(
        target=lambda: logger.critical("%s", describe()), name="easyrl-report", daemon=True
    )
    speaker.start()
    speaker.join(LOG_LIMIT_S)
    if speaker.is_alive():
        faulthandler.dump_traceback(STDERR, all_threads=True)


def _frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f"  {_place(frame.f_code, frame.f_lineno)}"
        frame = frame.f_back


def _awaits(task: asyncio.Task[Any]) -> Iterator[str]:
    """What ``task`` waits for, from its outermost coroutine inwards."""
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = next((kind for kind in _INNER if hasattr(awaited, f"{kind}_frame")), None)
        if kind is None:
            yield type(awaited).__name__
            return
        frame = getattr(awaited, f"{kind}_frame")
        yield _place(getattr(awaited, f"{kind}_code"), None if frame is None else frame.f_lineno)
        awaited = getattr(awaited, f"{kind}_{_INNER[kind]}")


def _place(code: CodeType, line: int | None) -> str:
    return f"{code.co_filename}:{line} in {code.co_qualname}"
