"""Attention over each segment's path from the root: keys and values of one path behind the other.

The copies live during a pass, not between passes: the backward pass gathers them again.

Shape legend: T tokens of the row, K keys of all paths together, Hq query and Hkv key heads, D size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

# Query [T, Hq, D], gathered key and value [K, Hkv, D] to [T, Hq, D]; differentiable.
PathKernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """``tokens`` [T, ...] at ``index``, int64 [K]: [K, ...].

    A token's gradient is the sum over all places that it is copied to. In half precision it is
    summed in float32 and rounded once: a prompt's last position is copied for each response.
    Deterministic where ``torch.use_deterministic_algorithms`` asks for it. Differentiable once.
    """
    gathered: Tensor = _GatherTokens.apply(tokens, index)
    return gathered


def attend_over_paths(
    kernel: PathKernel, query: Tensor, key: Tensor, value: Tensor, index: Tensor
) -> Tensor:
    """``kernel`` on ``query`` [T, Hq, D] and on ``key`` and ``value`` [T, Hkv, D] at ``index``,
    int64 [K]: [T, Hq, D].

    As ``kernel(query, gather_tokens(key, index), gather_tokens(value, index))``, but of what the
    kernel saves for its backward pass the gathered keys and values are left out. Nothing is
    computed twice but the gather. Differentiable once.
    """
    tensors = (query, key, value)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return kernel(query, key.index_select(0, index), value.index_select(0, index))
    output: Tensor = _AttendOverPaths.apply(kernel, query, key, value, index)
    return output


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
        return _sum_by_token(grad, index, ctx.num_tokens), None


class _AttendOverPaths(torch.autograd.Function):
    """Keeps the kernel's own graph, emptied of tensors: these are saved here, so that activation
    checkpointing and offloading see them as any others."""

    @staticmethod
    def forward(
        ctx: Any, kernel: PathKernel, query: Tensor, key: Tensor, value: Tensor, index: Tensor
    ) -> Tensor:
        gathered = (key.index_select(0, index), value.index_select(0, index))
        ctx.slots = _Slots(gathered)
        with torch.enable_grad(), saved_tensors_hooks(ctx.slots.put, ctx.slots.get):
            leaf = torch.empty(0, requires_grad=True)
            inputs = [_Start.apply(leaf, x) for x in (query, *gathered)]
            output = kernel(*inputs)
        ctx.inputs = [get_gradient_edge(x) for x in inputs]
        ctx.output = get_gradient_edge(output)
        ctx.save_for_backward(key, value, index, *ctx.slots.tensors[len(gathered) :])
        ctx.slots.tensors = []
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        key, value, index, *saved = ctx.saved_tensors
        gathered = (key.index_select(0, index), value.index_select(0, index))
        ctx.slots.tensors = [*gathered, *saved]
        try:
            # The graph stays for a caller that retains its own; it holds no tensors.
            grad_query, *grads = torch.autograd.grad(
                ctx.output, ctx.inputs, grad_output, retain_graph=True
            )
        finally:
            ctx.slots.tensors = []
        grad_key, grad_value = (_sum_by_token(grad, index, key.shape[0]) for grad in grads)
        return None, grad_query, grad_key, grad_value, None


class _Start(torch.autograd.Function):
    """Where a graph starts whose inputs are not to be held: leaves are, by their graph."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("gradients are taken here")


class _Slots:
    """What a graph saves, by number; between the passes ``tensors`` are kept elsewhere."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.tensors = list(given)

    def put(self, tensor: Tensor) -> int:
        known = [_identity(other) for other in self.tensors]
        if _identity(tensor) in known:
            return known.index(_identity(tensor))
        self.tensors.append(tensor)
        return len(known)

    def get(self, slot: int) -> Tensor:
        return self.tensors[slot]


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _sum_by_token(grad: Tensor, index: Tensor, num_tokens: int) -> Tensor:
    """``grad`` [K, ...] of the copies at ``index`` as that of ``num_tokens`` tokens [T, ...]."""
    dtype = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
    summed = grad.new_zeros(num_tokens, *grad.shape[1:], dtype=dtype)
    return summed.index_add_(0, index, grad.to(dtype)).to(grad.dtype)
