"""Attention over a forest of segments as one variable-length flash attention: each segment's
queries over the keys of its path from the root.

Causal and aligned at the bottom right, as flash attention is since version 2.1, that is exactly
what the layout allows: of a path that is longer than the segment, the last key belongs to the last
query. The kernel is ``flash_attn_interface`` (FlashAttention-3) on Hopper, ``flash_attn``, or
PyTorch's own, the first that is installed.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
arXiv 2307.08691.

Shape legend: T tokens of the row, K keys of all paths together, Hq query and Hkv key heads, D size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from easyrl.kernels.attention.path_gather import attend_over_paths, most_keys
from easyrl.kernels.attention.segment_layout import Paths, SegmentLayout

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8
_AMPERE = 8  # major compute capability, the least for flash attention
_HOPPER = 9

# Causal attention of each segment over its path, aligned at the bottom right, times a scale: query
# [T, Hq, D] over key and value [K, Hkv, D] gives [T, Hq, D]. Differentiable.
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Paths, float], Tensor]


def varlen_attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    scale: float,
    kernel: VarlenKernel | None = None,
) -> Tensor:
    """As ``reference_attention``.

    ``kernel`` is flash attention unless given. Keys and values are copied once for each path they
    are on, in each pass anew, a few segments' at a time (``path_gather``). Deterministic where
    ``torch.use_deterministic_algorithms`` asks for it. Raises ``ValueError`` for a device, a dtype
    or a head size that flash attention does not take, and ``ImportError`` if there is no kernel.
    """
    kernel = flash_kernel(query) if kernel is None else kernel
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    output = attend_over_paths(
        lambda q, k, v, paths: kernel(q, k, v, paths, scale),
        queries,
        keys,
        values,
        layout.paths(query.device, most_keys(key)),
    )
    return output.transpose(0, 1)[None]


def flash_kernel(query: Tensor) -> VarlenKernel:
    """Flash attention for tensors like ``query`` [1, Hq, T, D].

    Raises ``ValueError`` if there is none for its device, dtype or head size.
    """
    device, dtype, head_size = query.device, query.dtype, query.shape[-1]
    if device.type != "cuda":
        raise ValueError(
            f"varlen runs on CUDA devices, the tensors are on {device}; "
            "choose merged, or npu on Ascend"
        )
    if dtype not in _DTYPES:
        raise ValueError(
            f"varlen takes bfloat16 and float16, not {dtype}; train in bf16, "
            "or choose merged or flex"
        )
    if head_size > _LARGEST_HEAD or head_size % _HEAD_MULTIPLE:
        raise ValueError(
            f"varlen takes head sizes that are multiples of {_HEAD_MULTIPLE} up to "
            f"{_LARGEST_HEAD}, not {head_size}; choose merged or flex"
        )
    major, _ = torch.cuda.get_device_capability(device)
    if major < _AMPERE:
        raise ValueError(
            f"varlen needs compute capability {_AMPERE}.0 (Ampere), {device} has {major}; "
            "choose merged"
        )
    return installed_kernel(major)


@cache
def installed_kernel(capability: int) -> VarlenKernel:
    """The first that is installed for GPUs of major compute ``capability``.

    Raises ``ImportError`` if there is none.
    """
    modules = ["flash_attn_interface"] if capability == _HOPPER else []
    for name in [*modules, "flash_attn"]:
        try:
            module = import_module(name)
        except ImportError:  # not installed, or built for another version of torch
            continue
        # Came with FlashAttention 2.4.1; before 2.1 causal masks were aligned at the top left.
        if "deterministic" in signature(module.flash_attn_varlen_func).parameters:
            return _packaged_kernel(module.flash_attn_varlen_func)
    try:
        varlen = import_module("torch.nn.attention.varlen")
        if "enable_gqa" in (varlen.varlen_attn.__kwdefaults__ or ()):
            return torch_kernel
    except ImportError:
        pass
    raise ImportError(
        "varlen needs the package flash-attn 2.4.1 or later, or a PyTorch whose varlen_attn "
        "has enable_gqa, as 2.13's has; install one of them, or choose merged or flex",
        name="flash_attn",
    )


def torch_kernel(query: Tensor, key: Tensor, value: Tensor, paths: Paths, scale: float) -> Tensor:
    """PyTorch's own, which is deterministic where ``torch.use_deterministic_algorithms`` asks for
    it."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query,
        key,
        value,
        paths.query_starts,
        paths.key_starts,
        paths.max_query,
        paths.max_key,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, Tensor)  # no log-sum-exp was asked for
    return output


def _packaged_kernel(function: Callable[..., Any]) -> VarlenKernel:
    """``flash_attn_varlen_func`` of FlashAttention 2 or 3."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, paths: Paths, scale: float) -> Tensor:
        output = function(
            query,
            key,
            value,
            cu_seqlens_q=paths.query_starts,
            cu_seqlens_k=paths.key_starts,
            max_seqlen_q=paths.max_query,
            max_seqlen_k=paths.max_key,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Some versions of FlashAttention-3 return the log-sum-exp beside it.
        return output[0] if isinstance(output, tuple) else output

    return kernel
