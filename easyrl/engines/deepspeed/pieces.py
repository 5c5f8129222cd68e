"""Fragments of tensors as the pieces of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from easyrl.engines.base import SavedState, StatePiece
from easyrl.engines.deepspeed.shards import Fragment

MASTER, STEP = "master", "step"


def copy_pieces(kind: str, tensor: Tensor, fragments: Sequence[Fragment]) -> Iterator[StatePiece]:
    """Copies in host memory of the fragments of ``tensor``."""
    flat = tensor.detach().view(-1)
    for name, start, numel, offset in fragments:
        if numel > 0:
            values = flat[offset : offset + numel].to("cpu", copy=True)
            yield StatePiece(key_of(kind, name), start, values)


def read_pieces(
    kind: str, tensor: Tensor, fragments: Sequence[Fragment], saved: SavedState
) -> None:
    """Inverse of ``copy_pieces``. Raises ``ValueError`` for another dtype."""
    flat = tensor.detach().view(-1)
    for name, start, numel, offset in fragments:
        values = saved.read(key_of(kind, name), start, numel)
        if values.dtype != flat.dtype:
            raise ValueError(
                f"{key_of(kind, name)} is {values.dtype} in the checkpoint, here {flat.dtype}"
            )
        flat[offset : offset + numel].copy_(values)


def key_of(kind: str, name: str) -> str:
    """Of a tensor in the checkpoint."""
    return f"{kind}/{name}"
