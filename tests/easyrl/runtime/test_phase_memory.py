"""Peaks of memory by phase: what is held inside a phase counts there, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from easyrl.runtime import phase_memory
from easyrl.runtime.determinism import reproducible
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.runtime.phase_memory import EVERY_S, GIB, PhaseMemory

SIZE = 192 * 2**20  # bytes
MIB = 2**20


@pytest.fixture
def memory() -> Iterator[PhaseMemory]:
    memory = PhaseMemory(torch.device("cpu"))
    yield memory
    memory.close()


def test_what_is_gone_when_a_phase_ends_counts_in_it_alone(memory: PhaseMemory) -> None:
    clock = PhaseClock(memory.end_of_phase)
    with clock.phase("pack"):
        time.sleep(2 * EVERY_S)
    with clock.phase("train"):
        held = torch.ones(SIZE // 4)
        time.sleep(6 * EVERY_S)
        assert held[-1] == 1
        del held
    with clock.phase("step"):
        time.sleep(2 * EVERY_S)
    peaks = memory.take()
    host = {phase: peaks[f"memory/{phase}/host_peak_gib"] for phase in ("pack", "train", "step")}
    assert host["train"] - host["pack"] > 0.9 * SIZE / GIB
    assert host["train"] - host["step"] > 0.9 * SIZE / GIB
    assert peaks["memory/host_peak_gib"] >= host["train"] - 0.001  # rounded
    assert not any("device" in name for name in peaks)


def test_the_next_batch_begins_with_nothing(memory: PhaseMemory) -> None:
    clock = PhaseClock(memory.end_of_phase)
    with clock.phase("train"):
        pass
    assert "memory/train/host_peak_gib" in memory.take()
    assert memory.take().keys() == {"memory/host_peak_gib"}


def test_shared_memory_is_what_all_its_files_take(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [1]

    def statvfs(path: object) -> SimpleNamespace:
        assert str(path) == "/dev/shm"
        return SimpleNamespace(f_blocks=1000, f_bfree=1000 - used[0], f_frsize=MIB)

    fake = SimpleNamespace(statvfs=statvfs, pread=phase_memory.os.pread)
    monkeypatch.setattr(phase_memory, "os", fake)
    monkeypatch.setattr(phase_memory.Path, "is_dir", lambda path: True)
    memory = PhaseMemory(torch.device("cpu"))
    try:
        clock = PhaseClock(memory.end_of_phase)
        with clock.phase("sync"):
            used[0] = 256  # the new weights, until all endpoints have them
            time.sleep(6 * EVERY_S)
            used[0] = 128
        with clock.phase("report"):
            used[0] = 512
        peaks = memory.take()
    finally:
        memory.close()
    assert peaks["memory/sync/shm_peak_gib"] == 0.25
    assert peaks["memory/report/shm_peak_gib"] == 0.5


class Allocator:
    """A device's, as torch tells of it."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def holds(self, size: int) -> None:
        self.allocated = size
        self.peak = max(self.peak, size)

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated


def test_a_device_has_a_peak_in_each_phase_and_one_since_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    allocator.holds(8 * GIB)  # while the model is loaded
    allocator.holds(2 * GIB)
    memory = PhaseMemory(torch.device("cuda", 0))
    try:
        clock = PhaseClock(memory.end_of_phase)
        with clock.phase("train"):
            allocator.holds(5 * GIB)
            allocator.holds(3 * GIB)
        with clock.phase("step"):
            allocator.holds(4 * GIB)
            allocator.holds(2 * GIB)
        with clock.phase("train"):
            allocator.holds(6 * GIB)
            allocator.holds(2 * GIB)
        first = memory.take()
        with clock.phase("train"):
            allocator.holds(3 * GIB)
        with clock.phase("ledger"):
            allocator.holds(9 * GIB)
            second = memory.take()  # in the midst of it
    finally:
        memory.close()
    assert first["memory/train/device_peak_gib"] == 6
    assert first["memory/step/device_peak_gib"] == 4
    assert first["memory/device_peak_gib"] == 8
    assert second["memory/train/device_peak_gib"] == 3
    assert second["memory/device_peak_gib"] == 9


def test_no_strict_run_is_held_to_it(memory: PhaseMemory) -> None:
    PhaseClock(memory.end_of_phase).take()
    peaks = memory.take()
    assert peaks and reproducible(peaks | {"epoch": 0.5}) == {"epoch": 0.5}
