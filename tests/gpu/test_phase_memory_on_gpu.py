"""Peaks of a real device's allocator, by phase."""

from __future__ import annotations

import torch

from easyrl.runtime.phase_clock import PhaseClock
from easyrl.runtime.phase_memory import GIB, PhaseMemory
from tests.gpu.device import DEVICE, marks

pytestmark = marks
SIZE = 256 * 2**20


def test_a_tensor_that_is_gone_counts_in_its_phase_alone() -> None:
    device = torch.device(DEVICE)
    memory = PhaseMemory(device)
    try:
        clock = PhaseClock(memory.end_of_phase)
        with clock.phase("pack"):
            torch.ones(1, device=device)
        with clock.phase("train"):
            torch.ones(SIZE // 4, device=device)
        with clock.phase("step"):
            torch.ones(1, device=device)
        peaks = memory.take()
    finally:
        memory.close()
    by_phase = {p: peaks[f"memory/{p}/device_peak_gib"] for p in ("pack", "train", "step")}
    assert by_phase["train"] - by_phase["pack"] > 0.99 * SIZE / GIB
    assert by_phase["train"] - by_phase["step"] > 0.99 * SIZE / GIB
    assert peaks["memory/device_peak_gib"] >= by_phase["train"] - 1e-4
