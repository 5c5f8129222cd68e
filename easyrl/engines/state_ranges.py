"""What two ranges of a tensor's elements have in common, where either may be of some columns only.

A layout's ranks hold flat ranges of their own parameters. Of rows these are flat ranges of the
whole tensor too; of columns they are not. Any range is at most three blocks of the whole matrix:
the rest of its first row, whole rows, the beginning of its last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from easyrl.engines.base import Columns


class Block(NamedTuple):
    """Rows ``[top, bottom)`` and columns ``[left, right)`` of a whole matrix."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class StateRange:
    """Elements ``[start, start + numel)`` of a flattened tensor, or of its flattened columns."""

    start: int
    numel: int
    columns: Columns | None = None

    @property
    def end_in_tensor(self) -> int:
        """Behind its last element, in the whole flattened tensor."""
        end = self.start + self.numel
        if self.columns is None or self.numel == 0:
            return end
        row, column = divmod(end - 1, self.columns.width)
        return row * self.columns.of + self.columns.first + column + 1

    def lies_in(self, other: StateRange) -> bool:
        """Whether it is a part of ``other``, counted as that is."""
        begins = other.start <= self.start
        ends = self.start + self.numel <= other.start + other.numel
        return self.columns == other.columns and begins and ends


@dataclass(frozen=True, slots=True)
class Common:
    """A block that two ranges have, and how to find it in either."""

    block: Block
    saved: StateRange
    wanted: StateRange

    @property
    def stored(self) -> slice:
        """Of the saved elements: from the block's first to its last."""
        top, bottom, left, right = self.block
        last = _index(self.saved, bottom - 1, right - 1)
        return slice(_index(self.saved, top, left), last + 1)

    def of_stored(self, values: Tensor) -> Tensor:
        """The block, [rows, columns], a view of the saved elements ``stored``."""
        return _view(values, self.block, self.saved, 0)

    def of_wanted(self, values: Tensor) -> Tensor:
        """The same of all wanted elements."""
        at = _index(self.wanted, self.block.top, self.block.left)
        return _view(values, self.block, self.wanted, at)


def common(saved: StateRange, wanted: StateRange) -> Iterator[Common]:
    """Of one tensor: with equally long rows."""
    saved, wanted = _with_columns(saved, wanted), _with_columns(wanted, saved)
    for one in _blocks(saved):
        for other in _blocks(wanted):
            top, left = max(one.top, other.top), max(one.left, other.left)
            bottom, right = min(one.bottom, other.bottom), min(one.right, other.right)
            if top < bottom and left < right:
                yield Common(Block(top, bottom, left, right), saved, wanted)


def _with_columns(own: StateRange, other: StateRange) -> StateRange:
    """``own`` in rows as long as those of ``other``; one long row if neither has any."""
    if own.columns is not None:
        return own
    if other.columns is not None:
        of = other.columns.of
    else:
        of = max(1, own.start + own.numel, other.start + other.numel)
    return StateRange(own.start, own.numel, Columns(0, of, of))


def _blocks(some: StateRange) -> Iterator[Block]:
    assert some.columns is not None
    first, width, _ = some.columns
    row, column = divmod(some.start, width)
    left = some.numel
    while left > 0:
        if column == 0 and left >= width:
            rows, taken = left // width, width
        else:
            rows, taken = 1, min(width - column, left)
        yield Block(row, row + rows, first + column, first + column + taken)
        row, column, left = row + rows, 0, left - rows * taken


def _index(some: StateRange, row: int, column: int) -> int:
    """Which of its elements is in this place of the whole matrix."""
    assert some.columns is not None
    return row * some.columns.width + column - some.columns.first - some.start


def _view(values: Tensor, block: Block, some: StateRange, at: int) -> Tensor:
    """Of flat ``values``, in rows as long as those of ``some``, from element ``at``."""
    assert some.columns is not None
    shape = block.bottom - block.top, block.right - block.left
    return values.as_strided(shape, (some.columns.width, 1), values.storage_offset() + at)
