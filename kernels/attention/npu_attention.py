"""Attention over a forest of segments on Ascend: ``torch_npu.npu_fusion_attention``, each segment's
queries over the keys of its path from the root.

The operator's variable-length form ("TND") takes cumulative lengths; sparse mode 3 is causal and
aligned at the bottom right of each sequence, with one 2048 x 2048 mask for all lengths in which
True marks what is dropped. Names and limits are those of torch-npu 2.13's documentation of
``npu_fusion_attention``.

Shape legend: T tokens of the row, S segments, K keys of all paths together, Hq query heads, Hkv key
and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from easyrl.kernels.attention.path_gather import attend_over_paths
from easyrl.kernels.attention.segment_layout import Paths, SegmentLayout

_BOTTOM_RIGHT_CAUSAL = 3  # sparse_mode
_MASK_SIZE = 2048  # of the compressed mask that this mode expects
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 768
_MOST_QUERY_HEADS = 256
_MOST_SEQUENCES = 1024  # of one call in the variable-length form
_MOST_TOKENS = 1_000_000  # likewise, queries or keys


class _Call(NamedTuple):
    """Segments ``[first, last)`` with their stretches of the queries and of the gathered keys."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    query_ends: list[int]  # from query_start on
    key_ends: list[int]  # from key_start on


def npu_attention_backend(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """Attention of ``query`` [1, Hq, T, D] over ``key`` and ``value`` [1, Hkv, T, D]; the result is
    [1, Hq, T, D].

    Keys and values are copied once for each path they are on, in each pass anew. Rows of more
    segments or keys than the operator takes are split into several calls. Raises ``ImportError``
    without torch-npu, and ``ValueError`` for a dtype or a head size that the operator does not
    take.
    """
    torch_npu = _torch_npu()
    _check_supported(query)
    paths = layout.paths(query.device)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    outputs = [_attend(torch_npu, queries, keys, values, paths, c, scale) for c in _calls(paths)]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.transpose(0, 1)[None]


def _attend(
    torch_npu: ModuleType,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    paths: Paths,
    call: _Call,
    scale: float,
) -> Tensor:
    """One call of the operator: [query_end - query_start, Hq, D]."""

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = torch_npu.npu_fusion_attention(
            query,
            key,
            value,
            head_num=query.shape[1],
            input_layout="TND",
            atten_mask=_dropped(query.device),
            scale=scale,
            keep_prob=1.0,
            actual_seq_qlen=call.query_ends,
            actual_seq_kvlen=call.key_ends,
            sparse_mode=_BOTTOM_RIGHT_CAUSAL,
        )[0]
        return output

    return attend_over_paths(
        kernel,
        queries[call.query_start : call.query_end].contiguous(),
        keys,
        values,
        paths.key_index[call.key_start : call.key_end],
    )


def _calls(paths: Paths) -> Iterator[_Call]:
    """As few calls as the operator's limits on sequences and tokens allow."""
    count = len(paths.query_ends)
    first, query_start, key_start = 0, 0, 0
    while first < count:
        last = first + 1
        while (
            last < min(count, first + _MOST_SEQUENCES)
            and paths.key_ends[last] - key_start <= _MOST_TOKENS
        ):
            last += 1
        query_end, key_end = paths.query_ends[last - 1], paths.key_ends[last - 1]
        yield _Call(
            query_start,
            query_end,
            key_start,
            key_end,
            [end - query_start for end in paths.query_ends[first:last]],
            [end - key_start for end in paths.key_ends[first:last]],
        )
        first, query_start, key_start = last, query_end, key_end


@cache
def _dropped(device: torch.device) -> Tensor:
    """bool [2048, 2048], True above the diagonal: a causal mask in the operator's polarity."""
    ones = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device)
    return ones.triu_(diagonal=1)


def _torch_npu() -> ModuleType:
    try:
        return import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"npu needs torch-npu and Ascend's CANN ({error}); install them, or choose merged, "
            "which runs on any device"
        ) from error


def _check_supported(query: Tensor) -> None:
    heads, head_size = query.shape[1], query.shape[-1]
    if query.dtype not in _DTYPES:
        raise ValueError(
            f"npu takes bfloat16, float16 and float32, not {query.dtype}; choose merged"
        )
    if head_size > _LARGEST_HEAD or heads > _MOST_QUERY_HEADS:
        raise ValueError(
            f"npu takes up to {_MOST_QUERY_HEADS} query heads of size up to {_LARGEST_HEAD}, "
            f"not {heads} of size {head_size}; choose merged"
        )
