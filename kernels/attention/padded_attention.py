"""Shared-prompt attention as one padded batch: each segment's queries beside the keys of its path.

For rows of many short segments. There every block of ``merged`` is smaller than what calling a
kernel costs, and here the number of calls does not depend on the number of segments: keys of a path
are copied, and what is padded is computed and thrown away.

Shape legend: T tokens of the row, Hq query heads, Hkv key and value heads, R = Hq / Hkv, D head
size; S segments, n queries of the longest, K keys of the longest path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.attention.segment_layout import SegmentLayout

# Pairs of a query and a key in the batch, those of padding and mask included, for each that is
# wanted; and keys of the longest path. Measured on one CPU core with heads of 32 and 64: beyond
# these the blocks of ``merged`` are as fast; a third of them take 2 to 2.5 times as long.
_MOST_WORK = 5
_LONGEST_PATH = 96


class _Places(NamedTuple):
    """Where the tokens of a row lie in the batch: indices of vectors [D], of each head of a token.

    In the row they are ordered by token, then by head; in the batch by segment, then by head, then
    by query or key.
    """

    queries: Tensor  # int64 [S · Hq · n], in the row; a segment's last stands for what is padded
    padded: Tensor  # int64, which of these are padded
    back: Tensor  # int64 [T · Hq], of each query vector of the row among these
    keys: Tensor  # int64 [S · Hkv · K], in the row; a path's last stands for what is padded
    mask: Tensor  # [S · Hkv, R · n, K], 0 where a query sees a key, else -inf


def suits(layout: SegmentLayout) -> bool:
    """Whether a row is one of many short segments, for which this is the fastest form on a CPU."""
    return layout.derived(_suits)


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """As ``reference_attention``, on any device; differentiable once.

    Keeps the softmax's weights, S · Hq · n · K of them, for the backward pass, and with ``layout``
    a mask of as many numbers. The result's memory is that of a [1, T, Hq, D] tensor, as projections
    want it.
    """
    output: Tensor = _PaddedAttention.apply(query, key, value, layout, scale)
    return output


class _PaddedAttention(torch.autograd.Function):
    """The batch is [S · Hkv, R · n or K, D]: query heads that share a key head are more queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
    ) -> Tensor:
        heads = query.shape[1], key.shape[1]
        places = layout.derived(_places, *heads, query.dtype, query.device)
        q = _gather(query, places.queries, len(places.mask))
        k, v = (_gather(x, places.keys, len(places.mask)) for x in (key, value))
        weights = torch.baddbmm(places.mask, q, k.mT, alpha=scale).softmax(2)
        mixed = torch.bmm(weights, v)
        ctx.save_for_backward(q, k, v, weights)
        ctx.places, ctx.scale, ctx.heads = places, scale, heads
        return _by_token(mixed, places.back, query.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        places, (query_heads, key_heads) = ctx.places, ctx.heads
        grad = _gather(grad_output, places.queries, len(q))
        grad.view(-1, grad.shape[2]).index_fill_(0, places.padded, 0)
        grad_v = torch.bmm(weights.mT, grad)
        grad_weights = torch.bmm(grad, v.mT)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, 2, weights.dtype)
        grad_q = torch.baddbmm(q, grad_scores, k, beta=0, alpha=ctx.scale)
        grad_k = torch.baddbmm(k, grad_scores.mT, q, beta=0, alpha=ctx.scale)
        num_tokens = grad_output.shape[2]
        return (
            _by_token(grad_q, places.back, query_heads),
            *(_sum_by_token(x, places.keys, key_heads, num_tokens) for x in (grad_k, grad_v)),
            None,
            None,
        )


def _gather(x: Tensor, places: Tensor, num: int) -> Tensor:
    """The vectors of ``x`` [1, H, T, D] at ``places``, for the batch's ``num`` products:
    [S · Hkv, R · n or K, D]."""
    size = x.shape[3]
    vectors = x[0].transpose(0, 1).reshape(-1, size)  # of a projection's result the same memory
    return vectors.index_select(0, places).view(num, -1, size)


def _by_token(batch: Tensor, back: Tensor, num_heads: int) -> Tensor:
    """``batch`` [S · Hkv, R · n, D] as [1, Hq, T, D]."""
    size = batch.shape[2]
    vectors = batch.view(-1, size).index_select(0, back)
    return vectors.view(-1, num_heads, size).transpose(0, 1)[None]


def _sum_by_token(batch: Tensor, keys: Tensor, num_heads: int, num_tokens: int) -> Tensor:
    """Gradients of the copies, ``batch`` [S · Hkv, K, D], as those of the row: [1, Hkv, T, D]."""
    size = batch.shape[2]
    dtype = torch.promote_types(batch.dtype, torch.float32)
    total = batch.new_zeros(num_tokens * num_heads, size, dtype=dtype)
    total.index_add_(0, keys, batch.view(-1, size).to(dtype))
    return total.to(batch.dtype).view(num_tokens, num_heads, size).transpose(0, 1)[None]


def _suits(layout: SegmentLayout) -> bool:
    longest_path = max(layout.path_lengths)
    longest = max(length for _, length, _ in layout.segments)
    work = len(layout.segments) * longest * longest_path
    return longest_path <= _LONGEST_PATH and work <= _MOST_WORK * layout.num_pairs


def _places(
    layout: SegmentLayout,
    query_heads: int,
    key_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Places:
    (paths,) = layout.paths(torch.device("cpu"))
    lengths = torch.tensor([length for _, length, _ in layout.segments])
    key_lengths = torch.tensor(layout.path_lengths)
    query, key = torch.arange(int(lengths.max())), torch.arange(int(key_lengths.max()))
    starts = (paths.query_starts[:-1, None].long(), paths.key_starts[:-1, None].long())
    own = query < lengths[:, None]  # [S, n]
    queries = starts[0] + query.minimum(lengths[:, None] - 1)
    keys = paths.key_index[starts[1] + key.minimum(key_lengths[:, None] - 1)]  # [S, K]
    # aligned at the bottom right; a padded query sees what the segment's last does
    last = (key_lengths - lengths)[:, None] + query.minimum(lengths[:, None] - 1)
    mask = torch.zeros(len(lengths), len(query), len(key))
    mask.masked_fill_(key > last[:, :, None], float("-inf"))
    mask = mask[:, None].expand(-1, query_heads, -1, -1)
    of_queries = queries[:, None] * query_heads + torch.arange(query_heads)[:, None]  # [S, Hq, n]
    own = own[:, None].expand_as(of_queries)
    places = torch.arange(of_queries.numel()).view_as(of_queries)
    back = places.transpose(1, 2)[own.transpose(1, 2)]  # by token, then by head
    of_keys = keys[:, None] * key_heads + torch.arange(key_heads)[:, None]  # [S, Hkv, K]
    return _Places(
        of_queries.flatten().to(device),
        places[~own].to(device),
        back.to(device),
        of_keys.flatten().to(device),
        mask.reshape(len(lengths) * key_heads, -1, len(key)).to(device, dtype),
    )
