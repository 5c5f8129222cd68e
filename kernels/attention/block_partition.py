"""A packed row's attention cut into blocks of two kinds: causal squares and full rectangles.

Equal blocks at equal distances become one batch. Long triangles are halved again and again (what
is cut off is a rectangle), because fused kernels compute, and throw away, much of the upper half
of a square that is not longer than their own tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from easyrl.kernels.attention.segment_layout import SegmentLayout


class Span(NamedTuple):
    """``number`` stretches of ``length`` positions, the first from ``start``, ``step`` apart."""

    start: int
    length: int
    number: int
    step: int


class Block(NamedTuple):
    """Stretch i of ``queries`` sees stretch i of ``keys``: all of it, or causally.

    A causal block is square: its queries are its keys. The stretches of a span do not overlap.
    """

    queries: Span
    keys: Span
    causal: bool


def partition(
    layout: SegmentLayout, longest: int | None = None, most_queries: int | None = None
) -> tuple[Block, ...]:
    """Blocks that hold each visible pair of a query and a key once: first the causal ones, which
    hold each query once and its own key with it, then the rectangles.

    If given, ``longest`` limits the length of a causal block, ``most_queries`` the queries of a
    rectangle and of a whole batch, unless that is a single causal block.
    """
    triangles: list[tuple[int, int]] = []  # start, length
    full = list(_of_queries(layout))
    for (start, length, _), first in zip(layout.segments, layout.first_queries, strict=True):
        if first == length:
            continue
        if first:
            full.append((start + first, start + length, start, start + first))
        _halve(start + first, length - first, longest or length, triangles, full)
    # Where the queries of what is of one size, at one distance from its keys, begin.
    alike: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
    for start, length in triangles:
        alike[length, length, 0, True].append(start)
    for rectangle in full:
        for query_start, query_end, key_start, key_end in _cut(*rectangle, most_queries):
            distance = query_start - key_start
            kind = (query_end - query_start, key_end - key_start, distance, False)
            alike[kind].append(query_start)
    blocks = []
    for (num_queries, num_keys, distance, causal), starts in alike.items():
        apart = max(num_queries, num_keys)
        for first, count, step in _progressions(starts, num_queries, apart, most_queries):
            queries = Span(first, num_queries, count, step)
            keys = Span(first - distance, num_keys, count, step)
            blocks.append(Block(queries, keys, causal))
    return tuple(blocks)


def _of_queries(layout: SegmentLayout) -> Iterator[tuple[int, int, int, int]]:
    """The rectangles without tokens that are keys alone."""
    for query_start, query_end, key_start, key_end in layout.rectangles:
        for start, end in layout.query_stretches:
            if start < query_end and end > query_start:
                yield max(start, query_start), min(end, query_end), key_start, key_end


def _halve(
    start: int,
    length: int,
    longest: int,
    triangles: list[tuple[int, int]],
    full: list[tuple[int, int, int, int]],
) -> None:
    """The left part is ``longest`` times a power of 2, so that many blocks are equal."""
    if length <= longest:
        triangles.append((start, length))
        return
    left = longest
    while 2 * left < length:
        left *= 2
    middle = start + left
    full.append((middle, start + length, start, middle))
    _halve(start, left, longest, triangles, full)
    _halve(middle, length - left, longest, triangles, full)


def _cut(
    query_start: int, query_end: int, key_start: int, key_end: int, most_queries: int | None
) -> Iterator[tuple[int, int, int, int]]:
    """A rectangle in about equal parts of at most ``most_queries``."""
    length = query_end - query_start
    parts = 1 if most_queries is None else -(-length // most_queries)
    for part in range(parts):
        start = query_start + length * part // parts
        end = query_start + length * (part + 1) // parts
        yield start, end, key_start, key_end


def _progressions(
    starts: Sequence[int], length: int, apart: int, most_queries: int | None
) -> Iterator[tuple[int, int, int]]:
    """``starts`` as arithmetic progressions (first, count, step), greedily, in steps of at least
    ``apart``. Parts of nested segments' rectangles may be equal and overlap."""
    ordered = sorted(starts)
    limit = len(ordered) if most_queries is None else max(1, most_queries // length)
    while ordered:
        first, count = ordered[0], 1
        step = ordered[1] - first if len(ordered) > 1 else 1
        while (
            step >= apart
            and count < min(len(ordered), limit)
            and ordered[count] == first + count * step
        ):
            count += 1
        yield first, count, step
        ordered = ordered[count:]
