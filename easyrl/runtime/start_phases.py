"""What a run is doing before its first step, told with the time that it takes."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from easyrl.runtime.streams import tolerant

SAY_AFTER_S = 5.0  # that something takes, before it is over
SAY_EVERY_S = 30.0


class StartPhases:
    """Lines like ``easyrl: model 12.3 s``, one for each phase when the next begins.

    Of a phase that takes long it is told before, and again and again, that it goes on.

    Args:
        is_told: False on ranks other than the first, which say nothing.
    """

    def __init__(self, *, is_told: bool, stream: TextIO = sys.stderr) -> None:
        self._is_told = is_told
        self._stream = stream
        self._name: str | None = None
        self._begun_s = 0.0
        self._over = threading.Event()

    def begin(self, name: str) -> None:
        """Ends the phase before."""
        self.end()
        self._name, self._begun_s, self._over = name, time.monotonic(), threading.Event()
        if self._is_told:
            told = (name, self._begun_s, self._over)
            threading.Thread(target=self._tell, args=told, name="start", daemon=True).start()

    def end(self) -> None:
        """Without effect behind the last."""
        if self._name is None:
            return
        self._over.set()
        self._say(f"{self._name} {time.monotonic() - self._begun_s:.1f} s")
        self._name = None

    def abandon(self) -> None:
        """Something else is told: an error."""
        self._over.set()
        self._name = None

    def _tell(self, name: str, begun_s: float, over: threading.Event) -> None:
        pause_s = SAY_AFTER_S
        while not over.wait(pause_s):
            self._say(f"{name} … {time.monotonic() - begun_s:.0f} s so far")
            pause_s = SAY_EVERY_S

    def _say(self, text: str) -> None:
        if self._is_told:
            with tolerant(self._stream):
                print(f"easyrl: {text}", file=self._stream, flush=True)
