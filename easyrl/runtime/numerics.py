"""What decides the last bits of a floating point result on this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


# with which libraries let users choose their kernels
KERNEL_CHOICES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def arithmetic(device: str = "cpu") -> str:
    """In words: torch, the processor and its kernels, and this process's number of threads.

    Where two processes say the same, the same operations on the same values give the same bits;
    elsewhere sums may be taken in another order. ``device`` as torch names it, such as ``cuda:0``.
    """
    import torch

    threads = torch.get_num_threads()
    parts = [f"torch {torch.__version__}"]
    if torch.device(device).type == "cuda":
        parts += [torch.cuda.get_device_name(device), f"CUDA {torch.version.cuda}"]
    elif torch.device(device).type != "cpu":
        parts.append(device.partition(":")[0])
    parts += [torch.backends.cpu.get_cpu_capability(), _processor()]
    parts.append("1 thread" if threads == 1 else f"{threads} threads")
    parts += [f"{name}={os.environ[name]}" for name in KERNEL_CHOICES if name in os.environ]
    return ", ".join(parts)


def own_memory(module: nn.Module) -> None:
    """Moves each parameter into memory of torch's own, from where it lies in a mapped file.

    Matrix products choose their kernels by alignment too, so that the same weights in files of
    another layout would give other bits.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _processor() -> str:
    """Vendor, family and model: libraries choose their kernels by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        lines = []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    found = [said[key] for key in ("vendor_id", "cpu family", "model") if key in said]
    return " ".join(found) or platform.processor() or platform.machine()
