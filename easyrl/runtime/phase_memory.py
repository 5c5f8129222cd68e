"""Peaks of device, host and shared memory, by phase of the trainer's thread."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

GIB = 2**30
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of what the system says
STATM = Path("/proc/self/statm")  # resident pages; where there is none, nothing is said of a phase
SHARED_MEMORY = Path("/dev/shm")
EVERY_S = 0.05  # between two looks at what the host keeps no peak of that could be begun anew


class Peaks(NamedTuple):
    """Bytes; None: this machine does not tell."""

    device: int | None = None  # of allocated tensors
    host: int | None = None  # resident, of this process
    shared: int | None = None  # of all files in /dev/shm, also of other processes

    def and_also(self, other: Peaks) -> Peaks:
        return Peaks(*map(_largest, self, other))


class PhaseMemory:
    """The most memory that each phase took, and the process so far.

    Llama-Nemotron (section 5.2.2) has a profiler for each of the three. A device's allocator keeps
    a peak of its own, which begins anew with each phase; host and ``/dev/shm`` are read when a
    phase ends, and by a thread every ``EVERY_S`` meanwhile: what is gone sooner is not seen.

    Args:
        device: of the trainer; of the host's processor there are no figures.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._stretch, self._phases = Peaks(), dict[str, Peaks]()
        self._before = self._device_peak()  # the largest of the device so far
        self._statm = STATM.open("rb", buffering=0) if STATM.exists() else None
        self._shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._lock = threading.Lock()  # a sample is of one phase
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="easyrl-memory", daemon=True)
        self._thread.start()

    def end_of_phase(
        self, phase: str, start_s: float, end_s: float, args: Mapping[str, int | str]
    ) -> None:
        """Hears a ``PhaseClock``; to be called by the trainer's thread alone."""
        device = self._device_peak()
        self._before = _largest(self._before, device)
        with self._lock:
            peaks = self._stretch.and_also(self._now())._replace(device=device)
            self._stretch = Peaks()
        self._phases[phase] = peaks.and_also(self._phases.get(phase, Peaks()))

    def take(self) -> dict[str, float]:
        """GiB by metric: of the phases that have ended since this was called before, and of the
        process since its start. By the trainer's thread."""
        taken, self._phases = self._phases, {}
        metrics = {
            f"memory/{phase}/{name}_peak_gib": round(size / GIB, 4)
            for phase, peaks in taken.items()
            for name, size in zip(("device", "host", "shm"), peaks, strict=True)
            if size is not None
        }
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
        metrics["memory/host_peak_gib"] = resident / GIB
        if self._device is not None:
            module = torch.get_device_module(self._device)
            open_phase = module.max_memory_allocated(self._device)
            metrics["memory/device_peak_gib"] = max(self._before or 0, open_phase) / GIB
        return metrics

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        if self._statm is not None:
            self._statm.close()

    def _sample(self) -> None:
        while not self._closing.wait(EVERY_S):
            with self._lock:
                self._stretch = self._stretch.and_also(self._now())

    def _now(self) -> Peaks:
        host = shared = None
        if self._statm is not None:
            pages = os.pread(self._statm.fileno(), 128, 0).split()[1]
            host = int(pages) * resource.getpagesize()
        if self._shared is not None:
            found = os.statvfs(self._shared)
            shared = (found.f_blocks - found.f_bfree) * found.f_frsize
        return Peaks(None, host, shared)

    def _device_peak(self) -> int | None:
        """Since this was called before."""
        if self._device is None:
            return None
        module = torch.get_device_module(self._device)
        peak = module.max_memory_allocated(self._device)
        module.reset_peak_memory_stats(self._device)
        return int(peak)


def _largest(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
