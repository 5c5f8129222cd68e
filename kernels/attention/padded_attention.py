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
    """Where the tokens of a row lie in the batch."""

    queries: Tensor  # int64 [S · n], row positions; a segment's last stands for what is padded
    padded: Tensor  # int64, which of these are padded
    back: Tensor  # int64 [T], of each token's own query among these
    keys: Tensor  # int64 [S · K], row positions; a path's last stands for what is padded
    mask: Tensor  # float32 [S, 1, n, K], 0 where a query sees a key, else -inf
    num_queries: int  # n
    num_keys: int  # K


def suits(layout: SegmentLayout) -> bool:
    """Whether a row is one of many short segments, for which this is the fastest form on a CPU."""
    return layout.derived(_suits)


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """As ``reference_attention``, on any device; differentiable once.

    Keeps the softmax's weights, S · Hq · n · K of them, for the backward pass. The result's memory
    is that of a [1, T, Hq, D] tensor, as projections want it.
    """
    output: Tensor = _PaddedAttention.apply(query, key, value, layout, scale)
    return output


class _PaddedAttention(torch.autograd.Function):
    """The batch is [S · Hkv, R · n or K, D]: query heads that share a key head are more queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
    ) -> Tensor:
        places = layout.derived(_places, query.device)
        repeats = query.shape[1] // key.shape[1]
        q = _gather(query, places.queries, places.num_queries, repeats).mul_(scale)
        k, v = (_gather(x, places.keys, places.num_keys, 1) for x in (key, value))
        mask = places.mask.to(q.dtype).expand(-1, key.shape[1] * repeats, -1, -1)
        mask = mask.reshape(len(q), -1, places.num_keys)
        weights = torch.baddbmm(mask, q, k.mT).softmax(2)
        mixed = torch.bmm(weights, v)
        ctx.save_for_backward(q, k, v, weights)
        ctx.places, ctx.scale, ctx.shape = places, scale, query.shape
        return _by_token(mixed, places.back, places.num_queries, query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        places, shape = ctx.places, ctx.shape
        repeats = q.shape[1] // places.num_queries
        grad = _gather(grad_output, places.queries, places.num_queries, repeats, places.padded)
        grad_v = torch.bmm(weights.mT, grad)
        grad_weights = torch.bmm(grad, v.mT)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, 2, weights.dtype)
        grad_q = torch.bmm(grad_scores, k).mul_(ctx.scale)
        grad_k = torch.bmm(grad_scores.mT, q)
        return (
            _by_token(grad_q, places.back, places.num_queries, shape),
            *(_sum_by_token(x, places, shape) for x in (grad_k, grad_v)),
            None,
            None,
        )


def _gather(
    x: Tensor, index: Tensor, num_rows: int, repeats: int, without: Tensor | None = None
) -> Tensor:
    """``x`` [1, Hkv · R, T, D] at ``index`` [S · n], zeros at ``without``: [S · Hkv, R · n, D]."""
    _, num_heads, _, size = x.shape
    rows = x[0].transpose(0, 1).flatten(1).index_select(0, index)
    if without is not None:
        rows.index_fill_(0, without, 0)
    by_head = rows.view(-1, num_rows, num_heads // repeats, repeats, size).permute(0, 2, 3, 1, 4)
    return by_head.reshape(-1, repeats * num_rows, size)


def _rows(batch: Tensor, num_rows: int, num_heads: int) -> Tensor:
    """``batch`` [S · Hkv, R · n, D] as [S · n, Hq · D]."""
    size = batch.shape[-1]
    by_head = batch.view(-1, num_heads, num_rows, size)
    return by_head.transpose(1, 2).reshape(-1, num_heads * size)


def _by_token(batch: Tensor, back: Tensor, num_rows: int, shape: torch.Size) -> Tensor:
    """``batch`` [S · Hkv, R · n, D] as [1, Hq, T, D], ``shape``."""
    _, num_heads, num_tokens, size = shape
    rows = _rows(batch, num_rows, num_heads).index_select(0, back)
    return rows.view(num_tokens, num_heads, size).transpose(0, 1)[None]


def _sum_by_token(batch: Tensor, places: _Places, shape: torch.Size) -> Tensor:
    """Gradients of the copies, ``batch`` [S · Hkv, K, D], as those of the row: [1, Hkv, T, D]."""
    num_tokens, size = shape[2], shape[3]
    num_heads = batch.shape[0] * places.num_keys // len(places.keys)
    dtype = torch.promote_types(batch.dtype, torch.float32)
    total = batch.new_zeros(num_tokens, num_heads * size, dtype=dtype)
    total.index_add_(0, places.keys, _rows(batch, places.num_keys, num_heads).to(dtype))
    return total.to(batch.dtype).view(num_tokens, num_heads, size).transpose(0, 1)[None]


def _suits(layout: SegmentLayout) -> bool:
    longest_path = max(layout.path_lengths)
    longest = max(length for _, length, _ in layout.segments)
    work = len(layout.segments) * longest * longest_path
    return longest_path <= _LONGEST_PATH and work <= _MOST_WORK * layout.num_pairs


def _places(layout: SegmentLayout, device: torch.device) -> _Places:
    (paths,) = layout.paths(torch.device("cpu"))
    lengths = torch.tensor([length for _, length, _ in layout.segments])
    key_lengths = torch.tensor(layout.path_lengths)
    num_queries, num_keys = int(lengths.max()), int(key_lengths.max())
    query, key = torch.arange(num_queries), torch.arange(num_keys)
    starts = (paths.query_starts[:-1, None].long(), paths.key_starts[:-1, None].long())
    own = query < lengths[:, None]  # [S, n]
    queries = starts[0] + query.minimum(lengths[:, None] - 1)
    keys = paths.key_index[starts[1] + key.minimum(key_lengths[:, None] - 1)]
    # aligned at the bottom right; a padded query sees what the segment's last does
    last = (key_lengths - lengths)[:, None] + query.minimum(lengths[:, None] - 1)
    mask = torch.zeros(len(lengths), 1, num_queries, num_keys)
    mask.masked_fill_((key > last[:, :, None])[:, None], float("-inf"))
    own = own.flatten()
    return _Places(
        queries.flatten().to(device),
        (~own).nonzero().flatten().to(device),
        own.nonzero().flatten().to(device),
        keys.flatten().to(device),
        mask.to(device),
        num_queries,
        num_keys,
    )
