"""Tells event loops of what the engine's thread has finished, once per decode step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class News:
    """Events that are to be set when the engine's thread has handed out all of a step.

    Waking a loop is a system call in which the interpreter goes to the loop's thread: for each
    sample, it would hold up the next decode step each time.
    """

    def __init__(self) -> None:
        self._events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """``event``, which belongs to ``loop``, is set at the end of the step."""
        self._events.setdefault(loop, []).append(event)

    def tell(self) -> None:
        """The step is over."""
        if not self._events:
            return
        told, self._events = self._events, {}
        for loop, events in told.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, events)


def _set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
