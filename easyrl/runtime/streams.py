"""Standard output and error, which nobody may be reading and a run goes on without."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

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


def _discard(stream: IO[str]) -> None:
    """Also what is in its buffer, which the interpreter's end would fail on (status 120)."""
    with suppress(OSError):  # of a test, without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()
