"""Keys and values of each segment's path from the root, one path behind the other.

Shape legend: T tokens of the row, K keys of all paths together, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """``tokens`` [T, H, D] at ``index``, int64 [K]: [K, H, D].

    A token's gradient is the sum over all paths that it is on. In half precision it is summed in
    float32 and rounded once: a prompt is on as many paths as it has responses. Deterministic where
    ``torch.use_deterministic_algorithms`` asks for it. Differentiable once.
    """
    gathered: Tensor = _GatherTokens.apply(tokens, index)
    return gathered


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = tokens.shape[0]
        return tokens.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
        summed = grad.new_zeros(ctx.num_tokens, *grad.shape[1:], dtype=dtype)
        return summed.index_add_(0, index, grad.to(dtype)).to(grad.dtype), None
