"""The most memory that this process has had so far, on its device and on the host."""

from __future__ import annotations

import resource
import sys

import torch

GIB = 2**30
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of what the system says


def peak_memory(device: torch.device) -> dict[str, float]:
    """GiB by metric: of allocated tensors on ``device``, unless it is the host, and resident."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    peaks = {"memory/host_peak_gib": resident / GIB}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        peaks["memory/device_peak_gib"] = module.max_memory_allocated(device) / GIB
    return peaks
