"""A thread's processor time, and the time of steps without that in which others had its core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ThreadClock:
    """A thread's time since its start (Linux)."""

    cpu_s: float
    pushed_aside_s: float  # it could have run, and another had the core

    @classmethod
    def of(cls, thread_id: int | None = None) -> ThreadClock:
        path = Path(f"/proc/self/task/{thread_id or threading.get_native_id()}/schedstat")
        cpu_ns, pushed_aside_ns = path.read_text().split()[:2]
        return cls(int(cpu_ns) / 1e9, int(pushed_aside_ns) / 1e9)


def step_seconds(step: Callable[[], None], duration_s: float) -> list[float]:
    """Of each step for so long, without those in which another process had this thread's core."""
    durations_s = []
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        start_s = time.monotonic() - ThreadClock.of().pushed_aside_s
        step()
        durations_s.append(time.monotonic() - ThreadClock.of().pushed_aside_s - start_s)
    return durations_s
