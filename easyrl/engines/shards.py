"""A model's parameters as one rank holds them: whole, or its own ZeRO-3 shard."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn


def local_tensors(parameters: Iterable[nn.Parameter], *, sharded: bool) -> list[Tensor]:
    """This rank's storage of each parameter.

    With ``sharded`` nothing may be gathered: a change to a shard would not reach the gathered copy.
    """
    if not sharded:
        return [parameter.data for parameter in parameters]
    with_shards: list[Any] = list(parameters)  # DeepSpeed adds the attributes
    assert all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in with_shards)
    return [parameter.ds_tensor.data for parameter in with_shards]


def copy_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def restore(tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Writes ``saved`` into ``tensors``, to the bit."""
    for tensor, value in zip(tensors, saved, strict=True):
        assert tensor.shape == value.shape and tensor.dtype == value.dtype
        tensor.copy_(value)


def perturbation(name: str) -> float:
    """``1 + 0.05 u`` with ``0.3 <= |u| <= 1`` from a hash of ``name``: always to be seen."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    magnitude = 0.3 + 0.7 * int.from_bytes(digest[:4], "little") / 2**32
    sign = 1 if digest[4] & 1 else -1
    return 1 + 0.05 * sign * magnitude
