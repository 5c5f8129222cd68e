"""RMSNorm and rotary embedding in PyTorch's operations with backward passes written out, for CPUs.

Arguments as in ``plain``. There an operation costs a pass over memory, and autograd takes twice as
many of them as are needed. SwiGLU is the plain one: its backward is as short as one written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.layers.plain import swiglu as swiglu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``plain.rms_norm``; differentiable once."""
    output: Tensor = _RmsNorm.apply(x, weight, eps)
    return output


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As ``plain.rotary``; differentiable once, in ``query`` and ``key``."""
    output: tuple[Tensor, Tensor] = _Rotary.apply(query, key, cos, sin)
    return output


class _RmsNorm(torch.autograd.Function):
    """Keeps its inputs and one number per vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x.to(inverse.dtype) * inverse
        grad, wide_weight = grad.to(inverse.dtype), weight.to(inverse.dtype)
        product = grad * normed
        # of the mean square: what all entries of a vector share
        common = torch.matmul(product, wide_weight).div_(-x.shape[-1]).unsqueeze(-1)
        grad_weight = product.flatten(0, -2).sum(0)
        grad_x = (grad * wide_weight).addcmul_(normed, common).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Rotary(torch.autograd.Function):
    """Keeps the angles. The gradient is turned back by them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(query, cos, sin, 1), _turned(key, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_query, cos, sin, -1), _turned(grad_key, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    """``x`` [1, H, T, D] turned by the angles, or with ``way`` -1 the gradient turned back."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    sines = sin.unsqueeze(1).split(half, -1)[::way]
    turned = x * cos.unsqueeze(1)
    turned[..., :half].addcmul_(second, sines[0], value=-way)
    turned[..., half:].addcmul_(first, sines[1], value=way)
    return turned
