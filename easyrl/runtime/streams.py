"""Standard output and error, which nobody may be reading and a run goes on without."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO

logger = logging.getLogger(__name__)


@contextmanager
def tolerant(stream: IO[str]) -> Iterator[None]:
    """Inside, a ``stream`` that takes nothing (a closed pipe, a full disk) raises nothing.

    It is told of once; from then on what is written there is lost.
    """
    try:
        yield
    except OSError as error:
        _discard(stream)
        name = getattr(stream, "name", "a stream")
        logger.warning(
            "%s cannot be written (%s); the run goes on, what follows there is lost",
            name,
            error.strerror,
        )


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Inside, what anybody prints, libraries too, is as inside ``tolerant``. Not told of."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_tolerant_writer(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with tolerant(stream):
                stream.flush()
        sys.stdout, sys.stderr = before


class _TolerantFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            _discard(self)
            return len(memoryview(data).cast("B"))


def _tolerant_writer(stream: TextIO) -> TextIO:
    try:
        stream.flush()
        file = _TolerantFile(stream.fileno(), "wb", closefd=False)
    except OSError:  # of a test, without a descriptor, or broken already: ``_discard`` follows
        return stream
    encoding, errors = stream.encoding, stream.errors
    buffered = io.BufferedWriter(file)
    is_stderr = stream is sys.stderr
    return io.TextIOWrapper(buffered, encoding, errors, line_buffering=is_stderr or stream.isatty())


def _discard(stream: IO[Any] | io.FileIO) -> None:
    """Also what is in its buffer, which the interpreter's end would fail on (status 120)."""
    with suppress(OSError):  # of a test, without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()
