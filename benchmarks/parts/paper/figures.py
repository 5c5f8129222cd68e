"""What the paper's own tables say (periodic asynchrony, §6): facts, none of them measured here."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A row of a table of the paper."""

    devices: int
    steps: int
    tpspd: float  # tokens trained per second per device
    trained_tokens: float = 0.0  # 0: not given
    hours: float = 0.0


# Table 1: Qwen3-8B, contexts of 16k tokens; shared-prompt attention off, as in all of them
MINDSPEED_8B = Published(16, 100, 61.641, 706.355e6, 198.942)
SYNC_8B = Published(16, 100, 99.966, 827.306e6, 143.678)
ASYNC_8B = Published(16, 100, 192.259, 917.609e6, 82.861)
# Table 2: DeepSeek-R1-Distill-Qwen-32B
MINDSPEED_32B = Published(64, 20, 6.627, 107.874e6, 70.647)
ASYNC_32B = Published(48, 20, 33.449, 123.999e6, 21.453)
# Table 3: Qwen3-8B, asynchronous
SCALING_8B = {
    devices: Published(devices, 20, tpspd)
    for devices, tpspd in ((16, 188.162), (32, 171.824), (64, 163.208))
}
# §4.3: more than twice as early where a batch takes more than one inference batch
STARTUP_RATIO = 2.0


def speed_up(devices: int) -> float:
    """Tokens per second of Table 3 over those of its smallest cluster."""
    smallest = SCALING_8B[min(SCALING_8B)]
    of = SCALING_8B[devices]
    return of.tpspd * of.devices / (smallest.tpspd * smallest.devices)
