"""SIGINT and SIGTERM while a command is still importing: one sentence and the status of the signal.

Nothing is open by then that would have to be closed. Imports next to nothing: it comes first.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)
STDERR = 2


def end_at_signals() -> None:
    """Until other handlers are installed, which leaves no gap. Call it on the main thread."""
    for number in ENDING:
        signal.signal(number, _end)


def say(number: int, what: str) -> None:
    """Tells which signal does ``what``; safe in a signal handler, unlike ``print``."""
    os.write(STDERR, f"easyrl: {signal.Signals(number).name} {what}\n".encode())


def _end(number: int, _: FrameType | None) -> None:
    say(number, "ended it before it began")
    os._exit(128 + number)
