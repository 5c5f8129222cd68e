"""Waiting for a collective over gloo while Python's signal handlers run."""

from __future__ import annotations

import ctypes
import math
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LONGEST_WAIT = timedelta(days=7)  # a rank may wait hours for the slowest group of another


def wait_with_signals(
    work: Any,
    group: dist.ProcessGroup | None,
    *,
    longest_pause_s: float,
    within_s: float = math.inf,
) -> None:
    """Until ``work`` of ``group`` is done; a wait in C would defer the handlers.

    Raises what went wrong, ``TimeoutError`` if it is not done ``within_s`` seconds; then, or where
    a handler raises, ``group`` is of no use any more.
    """
    pause_s, deadline_s = longest_pause_s / 10, time.monotonic() + within_s
    try:
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"another process has not joined within {within_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)
    except BaseException:
        # The group's destructor joins a thread that waits for the other ranks, which Gloo's
        # abort() and shutdown() do not wake: the process would not end. Keep it for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        raise
    work.wait()
