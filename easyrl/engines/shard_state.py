"""A flat tensor of this rank, by the parameters that lie in it: copied out and read back.

Saved under the parameter's name and its place in the whole flattened parameter, so that any other
number of ranks finds what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from easyrl.engines.base import SavedState, StatePiece


class Fragment(NamedTuple):
    """Elements ``[start, start + numel)`` of a flattened parameter, at ``offset`` of a tensor."""

    name: str
    start: int
    numel: int
    offset: int


def own_part(fragment: Fragment, rank: int, num_ranks: int) -> Fragment:
    """What ``rank`` saves of a fragment that all ranks hold; may be empty."""
    first = fragment.numel * rank // num_ranks
    last = fragment.numel * (rank + 1) // num_ranks
    return fragment._replace(
        start=fragment.start + first, numel=last - first, offset=fragment.offset + first
    )


def copy_pieces(kind: str, flat: Tensor, fragments: Sequence[Fragment]) -> Iterator[StatePiece]:
    """Copies in host memory of the fragments of ``flat`` [n]."""
    for name, start, numel, offset in fragments:
        if numel > 0:
            values = flat[offset : offset + numel].detach().to("cpu", copy=True)
            yield StatePiece(key_of(kind, name), start, values)


def read_pieces(kind: str, flat: Tensor, fragments: Sequence[Fragment], saved: SavedState) -> None:
    """Inverse of ``copy_pieces``, into ``flat`` [n]. Raises ``ValueError`` for another dtype."""
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
