"""Tensor slices: what a worker answers when it is asked to prove its weights. No torch here.

A slice is a box of a checkpoint's tensor. Its digest is the blake3 hash of its numbers' bytes, in
row-major order and in the dtype that is served, keyed with the nonce of the question, so that
nobody can have formed it before (``keyed_digests.py``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor, and the form in which its numbers are hashed."""

    starts: tuple[int, ...]  # of each dimension
    sizes: tuple[int, ...]
    dtype: str  # that is served, by safetensors' name
    # Zeros of either sign, and numbers below the smallest normal one, are hashed as 0: read back
    # through a kernel that may flush them.
    flushed: bool = False


@dataclass(frozen=True, slots=True)
class ServedSlice:
    """A slice as one worker serves it."""

    slice: Slice
    digest: str  # keyed with the nonce, 64 hex digits
    copy: str = ""  # which of several copies that are in use; empty: the parameter itself
