"""Watches a run from outside: does it get on, and where does it hang if not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.parts.memory_peak import process_tree
from easyrl.metrics.event_log import decode_events

Event = dict[str, Any]
# Events that only work that gets done can cause; endpoints that come and go cause others.
PROGRESS = ("response_scored", "group_ready", "micro_batch_end", "step", "sync_end")
DUMP_WAIT_S = 3.0


class RunStuck(RuntimeError):
    """The run has done nothing for too long; the message shows where it hangs."""


class RunWatch:
    """Follows the event log of a run while it is written.

    Args:
        run_dir: the run's folder; the log may not exist yet.
        log: what the trainer prints.
        patience_s: how long the run may do nothing.
        take: is given each event of the first rank.
    """

    def __init__(
        self,
        run_dir: Path,
        log: Path,
        patience_s: float,
        take: Callable[[Event], object] = lambda event: None,
    ) -> None:
        self._path = run_dir / "events-rank0.jsonl"
        self._log = log
        self._patience_s = patience_s
        self._take = take
        self._read = 0  # bytes
        self._last: list[Event] = []
        self.progress_s = time.monotonic()
        self.longest_pause_s = 0.0
        self.num_batches = 0  # dispatched
        self.num_steps = 0

    def look(self) -> None:
        """Takes in what is new. Raises ``RunStuck`` if that is nothing, for too long."""
        for event in self._new_events():
            self._take(event)
            kind = event["event"]
            self._last = [*self._last[-29:], event]
            self.num_steps += kind == "step"
            if kind in PROGRESS and self.num_batches:  # before the first batch it starts up
                self.longest_pause_s = max(self.longest_pause_s, event["t"] - self.progress_s)
            if kind in PROGRESS or kind == "batch_dispatched":
                self.progress_s = event["t"]
            self.num_batches += kind == "batch_dispatched"
        quiet_s = time.monotonic() - self.progress_s
        if quiet_s > self._patience_s:
            raise RunStuck(f"nothing was done for {quiet_s:.0f} s")

    def dump(self, launcher: subprocess.Popen[bytes]) -> str:
        """The last events, and every thread of the trainer's processes; ends them.

        They have to run with PYTHONFAULTHANDLER=1.
        """
        events = "\n".join(str(event) for event in self._last)
        for process in process_tree(launcher.pid)[1:]:
            try:
                os.kill(process.pid, signal.SIGABRT)
            except ProcessLookupError:
                continue
        time.sleep(DUMP_WAIT_S)
        tail = self._log.read_text(errors="replace")[-12_000:]
        return f"--- last events ---\n{events}\n--- end of the trainer's log ---\n{tail}"

    def _new_events(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if self._path.stat().st_size < self._read:  # its end was cut off
                self._read = len(file.read())
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
        self._read += len(whole)
        return decode_events(whole)
