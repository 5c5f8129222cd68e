"""Whether a plan fits into a device, and with which changes it would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from easyrl.memory_plan.plan import MemoryPlan
from easyrl.memory_plan.remedies import Change, Load, remedies

# Of a device, for its context, communication libraries and fragmentation: a rule of thumb.
LEFT_FREE = 0.1


@dataclass(frozen=True)
class Verdict:
    """``device``: bytes; None: not known, nor whether it fits."""

    device: float | None
    fits: bool | None = None
    changes: Sequence[Change] = ()  # with which it would


def judge(plan: MemoryPlan, device: float | None, load: Load) -> Verdict:
    """``load`` gives the configuration of ``plan``, with further keys."""
    if device is None:
        return Verdict(None)
    usable = device * (1 - LEFT_FREE)
    if plan.needed <= usable:
        return Verdict(device, True)
    return Verdict(device, False, remedies(load, plan, usable, on_cpu=False))


def device_bytes() -> float | None:
    """Of the accelerator that this process would use; None without one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return None
    return float(torch.get_device_module(kind).mem_get_info()[1])
