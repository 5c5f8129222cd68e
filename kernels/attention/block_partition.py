"""A packed row's attention cut into blocks of two kinds: causal squares and full rectangles.

Equal blocks at equal distances become one batch. Long triangles are halved again and again (what
is cut off is a rectangle), because fused kernels compute, and throw away, much of the upper half
of a square that is not longer than their own tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


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
    segments: Iterable[tuple[int, int, int]],
    rectangles: Iterable[tuple[int, int, int, int]],
    longest: int | None = None,
    most_queries: int | None = None,
) -> tuple[Block, ...]:
    """Blocks that hold each visible pair once: first the causal ones, which hold each position
    once as query and once as key, then the rectangles.

    ``segments`` and ``rectangles`` are a ``SegmentLayout``'s. If given, ``longest`` limits the
    length of a causal block, ``most_queries`` the queries of a rectangle and of a whole batch,
    unless that is a single causal block.
    """
    triangles: list[tuple[int, int]] = []  # start, length
    full: list[tuple[int, int, int, int]] = list(rectangles)
    for start, length, _ in segments:
        if longest is None:
            triangles.append((start, length))
        else:
            _halve(start, length, longest, triangles, full)
    by_length: dict[int, list[int]] = defaultdict(list)
    for start, length in triangles:
        by_length[length].append(start)
    by_shape: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    pieces = (piece for rectangle in full for piece in _cut(*rectangle, most_queries))
    for query_start, query_end, key_start, key_end in pieces:
        shape = (query_end - query_start, key_end - key_start, query_start - key_start)
        by_shape[shape].append(query_start)
    blocks = []
    for length, starts in by_length.items():
        for first, count, step in _progressions(starts, length, length, most_queries):
            span = Span(first, length, count, step)
            blocks.append(Block(span, span, causal=True))
    for (query_length, key_length, offset), starts in by_shape.items():
        for first, count, step in _progressions(
            starts, query_length, max(query_length, key_length), most_queries
        ):
            queries = Span(first, query_length, count, step)
            blocks.append(Block(queries, Span(first - offset, key_length, count, step), False))
    return tuple(blocks)


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
