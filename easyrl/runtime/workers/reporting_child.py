"""A child process that says at least every second that it is alive, and is told in batches."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from easyrl.runtime.workers.child_process import HEARTBEAT_S, Child
from easyrl.runtime.workers.supervised_child import SupervisedChild

# One that says nothing for so many heartbeats hangs, or is stopped: it is killed. Before its first
# word it has to import and load what it needs, maybe on a busy machine.
MAX_SILENT_BEATS = 10
MAX_SILENT_BEATS_AT_START = 120


class ReportingChild(SupervisedChild):
    """A ``SupervisedChild`` that is killed when it is silent for too long.

    What is posted to it in one turn of the loop travels together.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._outbox: list[Any] = []

    @abstractmethod
    def batch(self, messages: Sequence[Any]) -> bytes:
        """``messages`` as the payload of one frame."""

    def post(self, message: Any) -> None:
        """Sends it with the others of this turn of the loop; lost without a process."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def on_start(self) -> None:
        self._num_silent_beats, self._max_silent_beats = 0, MAX_SILENT_BEATS_AT_START
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_silence, self.child)

    def on_message(self, payload: bytes) -> None:
        self._num_silent_beats, self._max_silent_beats = 0, MAX_SILENT_BEATS

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox:
            self.send(self.batch(outbox))

    def _check_silence(self, child: Child | None) -> None:
        """Checks are counted, not seconds: time in which this process was stopped or busy itself is
        one check, and what has arrived meanwhile is read before it."""
        if child is not self.child:  # it has ended
            return
        self._num_silent_beats += 1
        if self._num_silent_beats > self._max_silent_beats:
            self.kill(f"silent for {self._max_silent_beats * HEARTBEAT_S:.0f} s, and killed")
        else:
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_silence, child)
