"""Fragments of tensors as the pieces of a checkpoint, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from easyrl.engines.base import SavedState, StatePiece
from easyrl.engines.deepspeed.shards import Fragment

MASTER, STEP = "master", "step"


def copy_pieces(kind: str, tensor: Tensor, fragments: Sequence[Fragment]) -> Iterator[StatePiece]:
    """Copies in host memory of the fragments of ``tensor``; those that go on in one another, such
    as the rows of a projection of several heads, are one piece.
    """
    flat = tensor.detach().view(-1)
    by_name: dict[str, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        if fragment.numel > 0:
            by_name[fragment.name].append(fragment)
    for name, found in by_name.items():
        first, at = found[0], 0
        values = torch.empty(sum(each.numel for each in found), dtype=flat.dtype)
        for each in found:
            assert each.start == first.start + at and each.columns == first.columns, each
            values[at : at + each.numel] = flat[each.offset : each.offset + each.numel]
            at += each.numel
        yield StatePiece(key_of(kind, name), first.start, values, first.columns)


def read_pieces(
    kind: str, tensor: Tensor, fragments: Sequence[Fragment], saved: SavedState
) -> None:
    """Inverse of ``copy_pieces``; what is in no fragment becomes 0.

    Raises ``ValueError`` for another dtype.
    """
    flat = tensor.detach().view(-1)
    flat.zero_()
    for name, start, numel, offset, columns in fragments:
        if numel <= 0:
            continue
        values = saved.read(key_of(kind, name), start, numel, columns)
        if values.dtype != flat.dtype:
            raise ValueError(
                f"{key_of(kind, name)} is {values.dtype} in the checkpoint, here {flat.dtype}"
            )
        flat[offset : offset + numel].copy_(values)


def key_of(kind: str, name: str) -> str:
    """Of a tensor in the checkpoint."""
    return f"{kind}/{name}"
