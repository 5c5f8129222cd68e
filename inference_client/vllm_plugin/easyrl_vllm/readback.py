"""The weights that a layer computes with, read back to the shape that a checkpoint has.

vLLM's CPU build packs the weight of a linear layer for its kernels and keeps no other copy. A
product with the identity gives it back exactly: each output is one product and zeros. What it
cannot show is the sign of a zero and numbers below the smallest normal one, which the kernel may
flush to zero: there, the layer computes with what is read back as zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_COLUMNS = 256  # of the weight, per product


def is_packed(layer: Any) -> bool:
    """Whether ``layer`` multiplies with a copy of its weight that no tensor shows."""
    return hasattr(layer, "cpu_linear")


def read_packed(layer: Any, like: Tensor) -> Tensor:
    """Weight ``[out, in]`` that ``layer`` multiplies with, in the dtype and layout of ``like``."""
    num_rows, num_columns = like.shape
    weight = torch.empty(num_rows, num_columns, dtype=like.dtype)
    for start in range(0, num_columns, BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, num_columns)
        unit = torch.zeros(end - start, num_columns, dtype=like.dtype)
        unit[:, start:end].fill_diagonal_(1)
        weight[:, start:end] = layer.quant_method.apply(layer, unit, None).t()
    return weight
