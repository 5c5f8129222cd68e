"""RMSNorm, rotary embedding and SwiGLU by torch-npu's fused operators, on Ascend.

Arguments as in ``plain``. Names and limits are those of torch-npu 2.13's documentation of
``npu_rms_norm``, ``npu_rotary_mul`` and ``npu_swiglu``.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

_LARGEST_ROTARY = 896  # exclusive
_MOST_HEADS = 1000  # exclusive


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    output: Tensor = _torch_npu().npu_rms_norm(x, weight, epsilon=eps)[0]
    return output


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Raises ``ValueError`` for more or larger heads than the operator takes."""
    operator = _torch_npu().npu_rotary_mul
    heads, size = max(query.shape[1], key.shape[1]), query.shape[-1]
    if size >= _LARGEST_ROTARY or size % 2 or heads >= _MOST_HEADS:
        raise ValueError(
            f"npu takes heads of an even size below {_LARGEST_ROTARY} and fewer than {_MOST_HEADS} "
            f"of them, not {heads} of size {size}; choose none"
        )
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [1, 1, T, D]
    return operator(query, cos, sin), operator(key, cos, sin)  # mode "half"


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """One tensor of both is made for the operator, which splits it again."""
    output: Tensor = _torch_npu().npu_swiglu(torch.cat((gate, up), dim=-1), dim=-1)
    return output


def _torch_npu() -> ModuleType:
    try:
        return import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"npu needs torch-npu and Ascend's CANN ({error}); install them, or choose none"
        ) from error
