"""Attention over a forest of segments on Ascend: ``torch_npu.npu_fusion_attention``, each segment's
queries over the keys of its path from the root.

The operator's variable-length form ("TND") takes cumulative lengths; sparse mode 3 is causal and
aligned at the bottom right of each sequence, with one 2048 x 2048 mask for all lengths in which
True marks what is dropped. Names and limits are those of torch-npu 2.13's documentation of
``npu_fusion_attention``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from easyrl.kernels.attention.path_gather import attend_over_paths, most_keys
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

    Keys and values are copied once for each path they are on, in each pass anew, a few segments'
    at a time (``path_gather``), no more than the operator takes. Raises ``ImportError``
    without torch-npu, and ``ValueError`` for a dtype or a head size that the operator does not
    take.
    """
    torch_npu = _torch_npu()
    _check_supported(query)
    most = min(_MOST_TOKENS, most_keys(key))
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))

    def attend(q: Tensor, k: Tensor, v: Tensor, paths: Paths) -> Tensor:
        output: Tensor = torch_npu.npu_fusion_attention(
            q,
            k,
            v,
            head_num=q.shape[1],
            input_layout="TND",
            atten_mask=_dropped(q.device),
            scale=scale,
            keep_prob=1.0,
            actual_seq_qlen=list(paths.query_ends),
            actual_seq_kvlen=list(paths.key_ends),
            sparse_mode=_BOTTOM_RIGHT_CAUSAL,
        )[0]
        return output

    pieces = layout.paths(query.device, most, _MOST_SEQUENCES)
    output = attend_over_paths(attend, queries.contiguous(), keys, values, pieces)
    return output.transpose(0, 1)[None]


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
