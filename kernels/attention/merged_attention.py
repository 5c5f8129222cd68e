"""Shared-prompt attention in blocks over PyTorch's fused kernels, merged by log-sum-exp.

Each segment attends causally to itself, and all descendants of a segment attend to the whole of it
at once, without a mask. What a token gets from each is weighted by its share of the softmax's
denominator. Any depth of tree, any device; nothing quadratic exists between the passes.

Shape legend: T tokens of the row, Hq query heads, Hkv key and value heads, R = Hq / Hkv, D head
size; b batch and h heads of one kernel call, n its queries or keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.attention import partial_attention
from easyrl.kernels.attention.block_partition import Span, partition
from easyrl.kernels.attention.segment_layout import SegmentLayout

# The CPU kernel computes squares of up to 512 whole, causal or not. Its results are merged faster
# while they are in the cache, and small ones take no new pages from the system each time.
_LONGEST_CAUSAL_ON_CPU = 256
_MOST_QUERIES_ON_CPU = 1024


def merged_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """As ``reference_attention``; differentiable once.

    The result's memory is that of a [1, T, Hq, D] tensor, as projections want it.
    """
    output: Tensor = _MergedAttention.apply(query, key, value, layout, scale)
    return output


class _MergedAttention(torch.autograd.Function):
    """Keeps its inputs, its output and one number per token and head."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
    ) -> Tensor:
        query, key, value = (_unit_stride(x) for x in (query, key, value))
        _, num_heads, num_tokens, head_size = query.shape
        dtype = partial_attention.softmax_dtype(query.dtype)
        empty = query.new_empty if layout.all_are_queries else query.new_zeros
        output = empty(num_tokens, num_heads, head_size, dtype=dtype)
        logsumexp = query.new_empty(num_tokens, num_heads, 1, dtype=dtype)
        repeats = num_heads // key.shape[1]
        rows = [_by_token(query, repeats), _shared(key, repeats), _shared(value, repeats)]
        merged = [x.unflatten(1, (-1, repeats)) for x in (output, logsumexp)]
        for block in layout.derived(partition, *_limits(query.device)):
            for q, k, v, out, lse in zip(
                *_calls(rows[:1], block.queries),
                *_calls(rows[1:], block.keys),
                *_calls(merged, block.queries),
                strict=True,
            ):
                part, part_lse = partial_attention.forward(q, k, v, block.causal, scale)
                if block.causal:  # these come first and hold every query once
                    out.copy_(part)
                    lse.copy_(part_lse.unsqueeze(3))
                else:
                    _merge(out, lse, part.to(dtype), part_lse.unsqueeze(3))
        result = output.to(query.dtype).transpose(0, 1)[None]
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        repeats = query.shape[1] // key.shape[1]
        given = [_by_token(x, repeats) for x in (_unit_stride(grad_output), query, output)]
        given.append(logsumexp.unflatten(1, (-1, repeats)))
        shared = [_shared(key, repeats), _shared(value, repeats)]
        is_filled = ctx.layout.all_are_queries  # causal blocks then hold every token once
        grads = [_sums_by_token(x, is_filled) for x in (query, key, value)]  # [T, H, D]
        grad_query = [grads[0].unflatten(1, (-1, repeats))]
        grad_shared = [x.unsqueeze(2).expand(-1, -1, repeats, -1) for x in grads[1:]]
        for block in ctx.layout.derived(partition, *_limits(query.device)):
            first = block.causal and is_filled
            for call, (g, q, out, lse, k, v, *sums) in enumerate(
                zip(
                    *_calls(given, block.queries),
                    *_calls(shared, block.keys),
                    *_calls(grad_query, block.queries),
                    *_calls(grad_shared, block.keys),
                    strict=True,
                )
            ):
                parts = partial_attention.backward(
                    g, q, k, v, out, lse.squeeze(3), block.causal, ctx.scale
                )
                _add(sums[0], parts[0], first)
                for total, part in zip(sums[1:], parts[1:], strict=True):
                    _add(total, part, first and call == 0)
        back = (
            total.to(x.dtype).transpose(0, 1)[None]
            for total, x in zip(grads, (query, key, value), strict=True)
        )
        return (*back, None, None)


def _limits(device: torch.device) -> tuple[int | None, int | None]:
    """Of ``partition``."""
    return (_LONGEST_CAUSAL_ON_CPU, _MOST_QUERIES_ON_CPU) if device.type == "cpu" else (None, None)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _by_token(x: Tensor, repeats: int) -> Tensor:
    """[1, Hq, T, D] as [T, Hkv, R, D]."""
    return x[0].transpose(0, 1).unflatten(1, (-1, repeats))


def _shared(x: Tensor, repeats: int) -> Tensor:
    """[1, Hkv, T, D] as [T, Hkv, R, D], each head R times without a copy."""
    return x[0].transpose(0, 1).unsqueeze(2).expand(-1, -1, repeats, -1)


def _sums_by_token(x: Tensor, is_filled: bool) -> Tensor:
    """Memory for sums in the shape of ``x`` [1, H, T, D], as [T, H, D]; zeros unless it is filled
    before it is added to."""
    _, num_heads, num_tokens, head_size = x.shape
    dtype = partial_attention.softmax_dtype(x.dtype)
    empty = x.new_empty if is_filled else x.new_zeros
    return empty(num_tokens, num_heads, head_size, dtype=dtype)


def _calls(tensors: list[Tensor], span: Span) -> list[list[Tensor]]:
    """For each of ``tensors`` [T, Hkv, R, ·] its views [b, h, n, ·], one per kernel call.

    A kernel has two dimensions for what is independent, and there may be three here: stretches,
    key heads and the query heads that share one. A single stretch leaves two; several take a call
    for each of the R.
    """
    end = span.start + (span.number - 1) * span.step + span.length
    if span.number == 1:
        return [[x[span.start : end].permute(1, 2, 0, 3)] for x in tensors]
    stretches = [x[span.start : end].unfold(0, span.length, span.step) for x in tensors]
    return [[x[:, :, r].transpose(2, 3) for r in range(x.shape[2])] for x in stretches]


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Takes ``part`` [b, h, n, D] with log-sum-exp ``part_lse`` [b, h, n, 1] into the first two."""
    out.lerp_(part, torch.sigmoid(part_lse - lse))
    torch.logaddexp(lse, part_lse, out=lse)


def _add(total: Tensor, part: Tensor, first: bool) -> None:
    """Sums over the second dimension where ``total`` repeats one head there."""
    if total.stride(1) == 0:
        for repeat in range(part.shape[1]):
            _add(total[:, 0], part[:, repeat], first and repeat == 0)
    elif first:
        total.copy_(part)
    else:
        total.add_(part)
