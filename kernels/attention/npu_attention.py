"""Attention over a forest of segments on Ascend: ``torch_npu.npu_fusion_attention``, each segment's
queries over the keys of its path from the root.

The operator's variable-length form ("TND") takes cumulative lengths; sparse mode 3 is causal and
aligned at the bottom right of each sequence, with one 2048 x 2048 mask for all lengths in which
True marks what is dropped. Names and limits are those of torch-npu 2.13's documentation of
``npu_fusion_attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from types import ModuleType

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


def npu_attention_backend(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """As ``reference_attention``.

    Keys and values are copied once for each path they are on, in each pass anew. Rows of more
    segments or keys than the operator takes are split into several calls. Raises ``ImportError``
    without torch-npu, and ``ValueError`` for a dtype or a head size that the operator does not
    take.
    """
    torch_npu = _torch_npu()
    _check_supported(query)
    paths = layout.paths(query.device)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    query_starts, key_starts = (0, *paths.query_ends), (0, *paths.key_ends)
    outputs = []
    for first, last in _calls(paths):
        query_start, key_start = query_starts[first], key_starts[first]
        attend = partial(
            torch_npu.npu_fusion_attention,
            head_num=query.shape[1],
            input_layout="TND",
            atten_mask=_dropped(query.device),
            scale=scale,
            keep_prob=1.0,
            actual_seq_qlen=[end - query_start for end in paths.query_ends[first:last]],
            actual_seq_kvlen=[end - key_start for end in paths.key_ends[first:last]],
            sparse_mode=_BOTTOM_RIGHT_CAUSAL,
        )
        output = attend_over_paths(
            lambda *tensors, attend=attend: attend(*tensors)[0],
            queries[query_start : query_starts[last]].contiguous(),
            keys,
            values,
            paths.key_index[key_start : key_starts[last]],
        )
        outputs.append(output)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.transpose(0, 1)[None]


def _calls(paths: Paths) -> Iterator[tuple[int, int]]:
    """Segments from the first up to the last of a call, as few as the operator's limits allow."""
    first, key_start = 0, 0
    for segment, key_end in enumerate(paths.key_ends):
        if segment > first and (
            segment - first == _MOST_SEQUENCES or key_end - key_start > _MOST_TOKENS
        ):
            yield first, segment
            first, key_start = segment, paths.key_ends[segment - 1]
    yield first, len(paths.key_ends)


@cache
def _dropped(device: torch.device) -> Tensor:
    """bool [2048, 2048], True above the diagonal: a causal mask in the operator's polarity."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(diagonal=1)


def _torch_npu() -> ModuleType:
    try:
        return import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"npu needs torch-npu and Ascend's CANN ({error}); install them, or choose merged, "
            "which runs on any device"
        ) from error


def _check_supported(query: Tensor) -> None:
    heads, head_size, dtype = query.shape[1], query.shape[-1], query.dtype
    if dtype not in _DTYPES:
        raise ValueError(f"npu takes bfloat16, float16 and float32, not {dtype}; choose merged")
    if head_size > _LARGEST_HEAD or heads > _MOST_QUERY_HEADS:
        raise ValueError(
            f"npu takes up to {_MOST_QUERY_HEADS} query heads of size up to {_LARGEST_HEAD}, "
            f"not {heads} of size {head_size}; choose merged"
        )
