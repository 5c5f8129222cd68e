"""Attention over a packed row that is a forest of segments: at its simplest, prompt and responses.

A token attends to all tokens of its segment's ancestors, to its own segment up to and including
itself, and to nothing else. One signature, several backends in ``BACKENDS``; ``reference`` runs
everywhere and is what the others are checked against, ``padded`` and ``merged`` run everywhere too,
without the reference's dense mask.

Shape legend: T tokens of the row, Hq query heads, Hkv key and value heads (Hq a multiple of it),
D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch import Tensor
from torch.nn import functional as F

from easyrl.kernels.attention.segment_layout import SegmentLayout

Backend = Callable[[Tensor, Tensor, Tensor, SegmentLayout, float], Tensor]

# Where each lives: its module is imported when it is first asked for.
BACKENDS = {
    "reference": "easyrl.kernels.attention.shared_prompt_attention:reference_attention",
    "padded": "easyrl.kernels.attention.padded_attention:padded_attention",
    "merged": "easyrl.kernels.attention.merged_attention:merged_attention",
    "flex": "easyrl.kernels.attention.flex_attention:flex_attention_backend",
    "varlen": "easyrl.kernels.attention.varlen_attention:varlen_attention_backend",
    "npu": "easyrl.kernels.attention.npu_attention:npu_attention_backend",
}


def load_backend(name: str) -> Backend:
    """Raises ``ImportError`` if its package is not there."""
    module, function = BACKENDS[name].split(":")
    backend: Backend = getattr(import_module(module), function)
    return backend


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """``softmax(scale · q kᵀ)`` over what ``layout`` lets each token see, times v.

    ``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D]; the result is [1, Hq, T, D]. With
    a dense [T, T] mask, for any floating dtype, on any device. Differentiable.
    """
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=layout.dense_mask(query.device),
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
