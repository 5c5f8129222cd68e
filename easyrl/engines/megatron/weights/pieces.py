"""The parts of Hugging Face tensors that a tensor-parallel rank's parameter consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from easyrl.engines.megatron.weights.mapping import Rule, Split

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows (``dim`` 0) or columns (1) of a tensor, and where the parameter has them."""

    tensor: str
    dim: int
    start: int  # in the tensor
    at: int  # in the parameter
    size: int

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """A view of the Hugging Face tensor."""
        return tensor.narrow(self.dim, self.start, self.size)

    def of_parameter(self, parameter: Tensor) -> Tensor:
        """A view of the rank's parameter."""
        return parameter.narrow(self.dim, self.at, self.size)


@dataclass(frozen=True, slots=True)
class TensorRank:
    """A rank's place in its tensor-parallel group."""

    rank: int
    size: int

    def share(self, total: int, what: str) -> range:
        """Of ``total`` rows; raises ``ValueError`` where they cannot be shared evenly."""
        if total % self.size:
            raise ValueError(f"{what}: {total} cannot be shared by {self.size} ranks")
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)


def pieces(
    rule: Rule, shapes: Mapping[str, Shape], place: TensorRank, num_kv_heads: int
) -> list[Piece]:
    """In the order of the parameter. ``shapes``: of the whole tensors.

    Raises ``ValueError``, naming the tensor, if it cannot be shared by so many ranks.
    """
    first = rule.tensors[0]
    total = shapes[first]
    match rule.split:
        case Split.WHOLE:
            return [Piece(first, 0, 0, 0, total[0])]
        case Split.ROWS:
            rows = padded_share(total[0], place)
            return [Piece(first, 0, rows.start, 0, len(rows))] if rows else []
        case Split.COLUMNS:
            columns = place.share(total[1], first)
            return [Piece(first, 1, columns.start, 0, len(columns))]
        case Split.EACH_ROWS:
            shares = [(name, place.share(shapes[name][0], name)) for name in rule.tensors]
            return [
                Piece(name, 0, rows.start, number * len(rows), len(rows))
                for number, (name, rows) in enumerate(shares)
            ]
        case Split.BY_KV_GROUP:
            return _by_kv_group(rule, shapes, place, num_kv_heads)


def padded_share(total: int, place: TensorRank) -> range:
    """Rows of a vocabulary of ``total`` that are tokens; the last ranks may have none."""
    part = padded_size(total, place.size) // place.size
    return range(min(place.rank * part, total), min((place.rank + 1) * part, total))


def padded_size(total: int, num_ranks: int) -> int:
    """The least multiple of ``num_ranks`` that is not below ``total``."""
    return -(-total // num_ranks) * num_ranks


def _by_kv_group(
    rule: Rule, shapes: Mapping[str, Shape], place: TensorRank, num_kv_heads: int
) -> list[Piece]:
    """A rank's rows of q₁ k₁ v₁ q₂ k₂ v₂ …, where qᵢ are the query heads of key-value head i.

    With more ranks than key-value heads a rank's rows begin and end anywhere in a group; megatron's
    attention gathers them.
    """
    wanted = place.share(sum(shapes[name][0] for name in rule.tensors), rule.tensors[0])
    found = []
    for name, start, at, size in _interleaved(rule, shapes, num_kv_heads):
        low, high = max(at, wanted.start), min(at + size, wanted.stop)
        if low < high:
            found.append(Piece(name, 0, start + low - at, low - wanted.start, high - low))
    return found


def _interleaved(
    rule: Rule, shapes: Mapping[str, Shape], num_kv_heads: int
) -> Iterator[tuple[str, int, int, int]]:
    """Tensor, first row of it, first row of the interleaved one, and how many."""
    at = 0
    for group in range(num_kv_heads):
        for name in rule.tensors:
            size = shapes[name][0] // num_kv_heads
            yield name, group * size, at, size
            at += size
