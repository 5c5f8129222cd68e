"""RMSNorm, rotary embedding and SwiGLU in PyTorch's operations, as transformers' models have them.

Shape legend: T tokens, H heads, D the last dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [..., D] over the root of its mean square, times ``weight`` [D]; in ``x``'s dtype, the
    mean at least in float32.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``query`` [1, Hq, T, D] and ``key`` [1, Hkv, T, D] turned by the angles of ``cos`` and
    ``sin`` [1, T, D], whose halves are equal: entry i with entry i + D/2.

    Su et al., "RoFormer", arXiv 2104.09864.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (query * cos) + (_turned(query) * sin), (key * cos) + (_turned(key) * sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(``gate``) times ``up``, all [..., D].

    Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    return F.silu(gate) * up


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
