"""Processor seconds of a run's processes over time, seen from outside.

On a machine that does other work too they say more than the clock.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Self

import numpy as np
import psutil

from easyrl.inference_client.servers.managed import launch

INTERVAL_S = 0.25
SERVER_PROCESSOR, TRAINER_PROCESSOR = (
    "server processor",
    "trainer processor",
)  # the rest of the processes


class ProcessorTime:
    """A context manager: watches a process and its descendants while it is open."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._sides: dict[int, str] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, start: float, end: float) -> dict[str, float]:
        """Seconds of each side between two times of ``time.monotonic``, interpolated."""
        found = {}
        for side, samples in sorted(self._samples.items()):
            times, seconds = np.array(samples).T
            first, last = np.interp(np.array([start, end]), times, seconds)
            found[side] = float(last - first)
        return found

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            seconds = dict.fromkeys((SERVER_PROCESSOR, TRAINER_PROCESSOR), 0.0)
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    used = process.cpu_times()
                    seconds[self._side(process)] += used.user + used.system
            except psutil.NoSuchProcess:  # one has just ended: the next look is whole again
                continue
            for side, value in seconds.items():
                self._samples[side].append((time.monotonic(), value))

    def _side(self, process: psutil.Process) -> str:
        if process.pid not in self._sides:
            is_server = launch.EMBEDDED_SERVER in process.cmdline()
            self._sides[process.pid] = SERVER_PROCESSOR if is_server else TRAINER_PROCESSOR
        return self._sides[process.pid]
