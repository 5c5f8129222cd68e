"""When each model of a trainer ran forward and backward."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from easyrl.runtime.device_time import DeviceEvent

OnModelSpan = Callable[[str, float, float], object]  # name, start and end of time.monotonic
MOST_OPEN = 4096  # spans whose work may not be done; what is more is dropped


class _Launched(NamedTuple):
    name: str
    start: DeviceEvent
    end: DeviceEvent


class ModelSpans:
    """Told of each forward and backward, to ``on_span``; without one nothing is measured.

    On a device that runs behind the host a pair of events lies around each, and ``tell`` reads
    those whose work is done. ``before`` is called as each begins.
    """

    def __init__(self, new_event: Callable[[], DeviceEvent] | None = None) -> None:
        self.on_span: OnModelSpan | None = None
        self.before: Callable[[], object] = lambda: None
        self._new_event = new_event
        self._launched: deque[_Launched] = deque(maxlen=MOST_OPEN)

    @classmethod
    def of(cls, device: torch.device) -> ModelSpans:
        """For work on the current stream of ``device``."""
        if device.type == "cpu":
            return cls()
        module = torch.get_device_module(device)
        return cls(lambda: module.Event(enable_timing=True))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The work launched inside. Waits for nothing."""
        self.before()
        if self.on_span is None:
            yield
        elif self._new_event is None:
            start_s = time.monotonic()
            yield
            self.on_span(name, start_s, time.monotonic())
        else:
            start, end = self._new_event(), self._new_event()
            start.record()
            yield
            end.record()
            self._launched.append(_Launched(name, start, end))

    def tell(self) -> None:
        """What has been launched; waits for its work."""
        if not self._launched or self._new_event is None or self.on_span is None:
            return
        now = self._new_event()
        now.record()
        now.synchronize()
        now_s = time.monotonic()
        while self._launched:
            name, start, end = self._launched.popleft()
            since_s = (start.elapsed_time(now) / 1000, end.elapsed_time(now) / 1000)
            self.on_span(name, now_s - since_s[0], now_s - since_s[1])
