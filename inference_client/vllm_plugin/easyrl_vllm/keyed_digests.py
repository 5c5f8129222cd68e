"""Digests of tensor slices, keyed with a question's nonce; trainer and worker form them alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from .chunk_format import DTYPE_NAMES, HASH
from .slices import Slice

PARALLEL_BYTES = 2**20  # below, handing parts to other threads takes longer than hashing


def whole_slice(dtype: torch.dtype, shape: Sequence[int]) -> Slice:
    """All of a tensor, in its own dtype."""
    return Slice((0,) * len(shape), tuple(shape), DTYPE_NAMES[dtype])


def slice_digest(numbers: Tensor, nonce: bytes, *, flushed: bool = False) -> str:
    """Of all of ``numbers``, on any device; 64 hex digits. Uses all of the process's cores."""
    numbers = numbers.detach().cpu()
    if flushed and numbers.is_floating_point():
        tiny = torch.finfo(numbers.dtype).tiny
        numbers = numbers.masked_fill(numbers.abs() < tiny, 0)
    data = numbers.contiguous().view(-1).view(torch.uint8).numpy()
    threads = blake3.AUTO if len(data) >= PARALLEL_BYTES else 1
    return blake3(data.data, key=nonce, max_threads=threads).hexdigest()


def parse_nonce(text: object) -> bytes:
    """32 bytes from 64 hex digits. Raises ``ValueError``."""
    if not isinstance(text, str) or not HASH.fullmatch(text):
        raise ValueError(f"nonce: {str(text)[:80]!r} is not 64 hex digits")
    return bytes.fromhex(text)
