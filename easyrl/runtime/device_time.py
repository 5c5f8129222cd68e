"""Seconds of work on a device that runs behind the host, as CUDA devices and NPUs do.

A launch returns before its work is done, so the host's clock measures launches. Instead a pair of
events lies around each span in the device's own order of work; they are read once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """What ``torch.cuda.Event`` and ``torch.npu.Event`` have in common."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: DeviceEvent, /) -> float:
        """Milliseconds from this event to ``end_event``; both have happened."""
        ...


class DeviceTimer:
    """Adds up spans of work on a device. ``new_event`` None: work is done when its call returns."""

    def __init__(self, new_event: Callable[[], DeviceEvent] | None = None) -> None:
        self._new_event = new_event
        self._spans: list[tuple[DeviceEvent, DeviceEvent]] = []  # not read yet
        self._total_s = 0.0

    @classmethod
    def of(cls, device: torch.device) -> DeviceTimer:
        """For work on the current stream of ``device``."""
        if device.type == "cpu":
            return cls()
        module = torch.get_device_module(device)
        return cls(lambda: module.Event(enable_timing=True))

    @property
    def runs_behind(self) -> bool:
        """Whether work goes on when the call that launched it has returned."""
        return self._new_event is not None

    @contextmanager
    def span(self) -> Iterator[None]:
        """The work launched inside, from the end of what was launched before; host work inside
        counts as far as the device waits for it. Waits for nothing.
        """
        if self._new_event is None:
            start_s = time.monotonic()
            yield
            self._total_s += time.monotonic() - start_s
            return
        start, end = self._new_event(), self._new_event()
        start.record()
        yield
        end.record()
        self._spans.append((start, end))

    def wait(self) -> None:
        """Until the work of all spans is done."""
        if self._spans:
            self._spans[-1][1].synchronize()

    def total_s(self) -> float:
        """Seconds of all spans so far; waits for their work."""
        self.wait()
        self._total_s += sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        self._spans.clear()
        return self._total_s
