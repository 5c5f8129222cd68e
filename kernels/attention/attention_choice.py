"""Which backend of ``shared_prompt_attention`` suits a device, a dtype and a row."""

from __future__ import annotations

import torch

# Up to here the reference's one call beats several smaller ones on a CPU (measured with 8 heads of
# 64; forward and backward). Anywhere such rows are too small to judge a backend by, and a run's
# first ones often are: a probe's, or what stands in for a missing micro-batch.
_TINY_ROW = 256
_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)


def is_tiny(num_tokens: int) -> bool:
    return num_tokens <= _TINY_ROW


def backends_in_order(
    device: torch.device, dtype: torch.dtype, head_size: int, num_tokens: int
) -> tuple[str, ...]:
    """Best first, the last is the reference. Whether their packages are installed is not looked
    at; the one to use is the first that works. Tiny rows take the reference on every device."""
    if is_tiny(num_tokens):
        return ("reference",)
    match device.type:
        case "cuda":
            return (*_of_gpus(device, dtype, head_size), "merged", "reference")
        case "npu":
            return ("npu", "merged", "reference")
        case _:
            return ("merged", "reference")


def _of_gpus(device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[str, ...]:
    """Limits as the kernels state them; older GPUs lack the instructions of both."""
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return ()
    varlen = dtype in _HALF and head_size <= 256 and head_size % 8 == 0
    flex = dtype in (*_HALF, torch.float32) and head_size >= 16
    return ("varlen",) * varlen + ("flex",) * flex
