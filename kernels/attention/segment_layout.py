"""Where the tokens of a packed row stand: a forest of segments, and what attention derives from it.

Shape legend: T tokens of the row, S segments, K keys of all paths together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Rectangle(NamedTuple):
    """Queries ``[query_start, query_end)`` see all keys ``[key_start, key_end)``."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


class Paths(NamedTuple):
    """Segments in a row, each with the keys of its whole path from the root, for one
    variable-length call; S of them.

    Aligned at the bottom right, causal attention of each segment's queries over its path's keys is
    exactly what the layout allows.
    """

    key_index: Tensor  # int64 [K], row positions
    query_ends: tuple[int, ...]  # S, cumulative lengths without the leading 0
    key_ends: tuple[int, ...]  # S
    query_starts: Tensor  # int32 [S + 1], the same with it
    key_starts: Tensor  # int32 [S + 1]
    max_query: int
    max_key: int


class SegmentLayout:
    """The forest of segments of one row, in depth-first order.

    ``segments`` are triples ``(start, length, parent)``: contiguous from 0 in row order, ``parent``
    the index of an earlier segment or -1 for a root. Depth-first: behind a segment come all its
    descendants, then anything else, so that the descendants of each are one stretch of the row.
    Raises ``ValueError`` where they are not. What is derived is computed once, per device: a layout
    is shared by a model's layers and by the three models.

    With ``first_queries`` the tokens of segment s before its ``first_queries[s]``-th are keys
    alone: nobody looks at what attention gives for their queries, and a backend need not compute
    it. By default all are queries.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, int]],
        first_queries: Sequence[int] | None = None,
    ) -> None:
        _check_segments(segments)
        self.segments = tuple(segments)
        self.first_queries = tuple(first_queries or (0,) * len(segments))
        self.num_tokens = sum(length for _, length, _ in segments)  # T
        self._derived: dict[Hashable, Any] = {}

    def derived(self, compute: Callable[..., T], *args: Hashable) -> T:
        """``compute(self, *args)``, computed once for these arguments."""
        key = (compute, *args)
        if key not in self._derived:
            self._derived[key] = compute(self, *args)
        return self._derived[key]

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """One for each segment with descendants: these see all of it.

        Together with each segment's causal triangle they are what the layout allows.
        """
        ends = [start + length for start, length, _ in self.segments]
        for index in range(len(self.segments) - 1, -1, -1):  # descendants first
            parent = self.segments[index][2]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[index])
        return tuple(
            Rectangle(start + length, end, start, start + length)
            for (start, length, _), end in zip(self.segments, ends, strict=True)
            if end > start + length
        )

    @property
    def all_are_queries(self) -> bool:
        return not any(self.first_queries)

    @cached_property
    def query_stretches(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each stretch of tokens that are queries, as long as they can be."""
        stretches: list[tuple[int, int]] = []
        for (start, length, _), first in zip(self.segments, self.first_queries, strict=True):
            if stretches and stretches[-1][1] == start + first:
                stretches[-1] = (stretches[-1][0], start + length)
            elif first < length:
                stretches.append((start + first, start + length))
        return tuple(stretches)

    @cached_property
    def path_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment's path from its root, its own among them."""
        lengths: list[int] = []
        for _, length, parent in self.segments:
            lengths.append(length + (lengths[parent] if parent >= 0 else 0))
        return tuple(lengths)

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees: attention's work is proportional to them."""
        own = sum(length * (length + 1) // 2 for _, length, _ in self.segments)
        return own + sum(
            (r.query_end - r.query_start) * (r.key_end - r.key_start) for r in self.rectangles
        )

    def dense_mask(self, device: torch.device) -> Tensor:
        """bool [T, T] on ``device``: entry (q, k) is True where query q sees key k."""
        return self.derived(_dense_mask, device)

    def paths(
        self, device: torch.device, most_keys: int | None = None, most_segments: int | None = None
    ) -> tuple[Paths, ...]:
        """The gathered form of the row, its tensors on ``device``, in as few pieces as have at most
        ``most_keys`` and ``most_segments`` each; a path that is longer is a piece of its own.
        """
        return self.derived(_paths, device, most_keys, most_segments)


def _check_segments(segments: Sequence[tuple[int, int, int]]) -> None:
    end = 0
    open_segments: list[int] = []  # the last segment and its ancestors
    for index, (start, length, parent) in enumerate(segments):
        if start != end or length < 1:
            raise ValueError(
                f"segments[{index}] is (start {start}, length {length}); segments have "
                f"at least one token and follow each other without gaps, from {end} here"
            )
        if not -1 <= parent < index:
            raise ValueError(
                f"segments[{index}] has parent {parent}; it has to be an earlier "
                f"segment, or -1 for a root"
            )
        while open_segments and open_segments[-1] != parent:
            open_segments.pop()
        if parent >= 0 and not open_segments:
            raise ValueError(
                f"segments[{index}] has parent {parent}, whose descendants ended before it; "
                "order segments depth first"
            )
        open_segments.append(index)
        end = start + length
    if end == 0:
        raise ValueError("a row has at least one segment")


def _dense_mask(layout: SegmentLayout, device: torch.device) -> Tensor:
    _, lengths, parents = torch.tensor(layout.segments, device=device).unbind(1)
    index = torch.arange(len(parents), device=device)
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool, device=device)
    above = parents
    while bool((known := above >= 0).any()):  # one generation further up each time
        ancestors[index[known], above[known]] = True
        above = torch.where(known, parents[above], above)
    segment = index.repeat_interleave(lengths)  # [T], the segment of each token
    own = (segment[:, None] == segment[None, :]).tril_()
    return own.logical_or_(ancestors.index_select(0, segment).index_select(1, segment))


def _paths(
    layout: SegmentLayout, device: torch.device, most_keys: int | None, most_segments: int | None
) -> tuple[Paths, ...]:
    pieces: list[Paths] = []
    path_of: list[Tensor] = []  # int64 [path length], row positions
    first, num_keys = 0, 0
    for segment, (start, length, parent) in enumerate(layout.segments):
        own = torch.arange(start, start + length)
        path = own if parent < 0 else torch.cat([path_of[parent], own])
        full = most_keys is not None and num_keys + len(path) > most_keys
        if segment > first and (full or segment - first == most_segments):
            pieces.append(_piece(layout, device, path_of[first:], first))
            first, num_keys = segment, 0
        path_of.append(path)
        num_keys += len(path)
    pieces.append(_piece(layout, device, path_of[first:], first))
    return tuple(pieces)


def _piece(
    layout: SegmentLayout, device: torch.device, key_index: list[Tensor], first: int
) -> Paths:
    """Of the segments from ``first`` on, whose paths are ``key_index``."""
    lengths = [length for _, length, _ in layout.segments[first : first + len(key_index)]]
    key_lengths = [len(path) for path in key_index]
    query_ends = tuple(torch.tensor(lengths).cumsum(0).tolist())
    key_ends = tuple(torch.tensor(key_lengths).cumsum(0).tolist())
    return Paths(
        torch.cat(key_index).to(device),
        query_ends,
        key_ends,
        query_starts=torch.tensor((0, *query_ends), dtype=torch.int32, device=device),
        key_starts=torch.tensor((0, *key_ends), dtype=torch.int32, device=device),
        max_query=max(lengths),
        max_key=max(key_lengths),
    )
