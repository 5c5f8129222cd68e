"""Elements of a rank's parameters as elements of Hugging Face's tensors: a checkpoint's names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from easyrl.engines.base import Columns
from easyrl.engines.deepspeed.shards import Fragment
from easyrl.engines.megatron.weights.mapping import Rule, Split
from easyrl.engines.megatron.weights.pieces import Piece, Shape


def tensor_fragments(
    fragment: Fragment, held: Sequence[Piece], shapes: Mapping[str, Shape]
) -> Iterator[Fragment]:
    """The same elements, told by the tensors; those that pad a vocabulary are in none.

    Args:
        fragment: of a rank's flattened parameter.
        held: what that parameter consists of.
        shapes: of the whole tensors.
    """
    for piece in held:
        shape = shapes[piece.tensor]
        if piece.dim == 1:  # the parameter is these columns
            columns = Columns(piece.start, piece.size, shape[1])
            is_whole = piece.size == shape[1]
            yield fragment._replace(name=piece.tensor, columns=None if is_whole else columns)
            continue
        row = math.prod(shape[1:])
        begin = max(fragment.start, piece.at * row)
        end = min(fragment.start + fragment.numel, (piece.at + piece.size) * row)
        if begin < end:
            start = begin + (piece.start - piece.at) * row
            offset = fragment.offset + begin - fragment.start
            yield Fragment(piece.tensor, start, end - begin, offset)


def told_by(rules: Mapping[str, Rule], tensor_rank: int) -> set[str]:
    """The parameters that a tensor rank saves: of what all have alike the first's, and of a tied
    embedding the first of ``rules``.
    """
    known: set[str] = set()
    found = set()
    for name, rule in rules.items():
        if known.isdisjoint(rule.tensors) and (rule.split is not Split.WHOLE or tensor_rank == 0):
            found.add(name)
        known.update(rule.tensors)
    return found
