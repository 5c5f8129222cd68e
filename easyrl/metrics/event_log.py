"""The run's own record of what happened when, from every thread, one JSON object per line."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger(__name__)

Record = Callable[..., None]  # (event, **fields): how parts report one


def ignore(event: str, **fields: Any) -> None:
    """A ``Record`` that keeps nothing."""


class EventLog:
    """Appends ``{"seq", "t", "event", ...}``; ``seq`` is a total order, ``t`` is monotonic seconds.

    Each line is handed to the operating system at once, so that a killed run leaves its last one.
    One that cannot be written is lost, as a gap in ``seq`` tells; the log says so the first time.
    The file is there from the first event on: an attempt that is refused leaves none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._seq = 0
        self._has_warned = False

    def record(self, event: str, **fields: Any) -> None:
        with self._lock:
            if self._closed:
                return
            line = {"seq": self._seq, "t": time.monotonic(), "event": event, **fields}
            self._seq += 1
            try:
                self._append(orjson.dumps(line) + b"\n")
            except OSError as error:
                self._told_lost(error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._close_file()

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._file = _open_on_a_new_line(self._path)
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _told_lost(self, error: OSError) -> None:
        """The next event begins a new line, once it can be written."""
        with suppress(OSError):
            self._close_file()
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: an event cannot be written (%s); the run goes on without it",
                self._path,
                error.strerror,
            )

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a log, in order; without a line whose end was lost."""
    return decode_events(path.read_bytes())


def decode_events(content: bytes) -> list[dict[str, Any]]:
    """Those of the whole lines of ``content``."""
    events = []
    for line in content.splitlines():
        try:
            events.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return events


def _open_on_a_new_line(path: Path) -> FileIO:
    """To append to; an earlier attempt's last line may have lost its end."""
    file = path.open("ab+", buffering=0)
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file
