"""Spans of one batch under a bound: beyond it, every second one of the most frequent kind goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Recorded(NamedTuple):
    """A span as it is told, before its batch is over."""

    lane: str
    name: str
    start_s: float  # of time.monotonic
    end_s: float
    args: Mapping[str, int | str]


class ThinnedSpans:
    """At most ``most`` spans, of each kind (lane and name) spread evenly over all that came.

    Rare kinds stay whole while frequent ones are thinned out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._num_kept = 0

    def __iter__(self) -> Iterator[Recorded]:
        for kind in self._kinds.values():
            yield from kind.kept

    @property
    def num_left_out(self) -> int:
        return sum(kind.num_seen for kind in self._kinds.values()) - self._num_kept

    def add(self, span: Recorded) -> None:
        kind = self._kinds.setdefault((span.lane, span.name), _Kind())
        if kind.add(span):
            self._num_kept += 1
            if self._num_kept > self._most:
                self._num_kept -= max(self._kinds.values(), key=lambda kind: len(kind.kept)).halve()


class _Kind:
    """Each ``stride``-th span of one kind."""

    def __init__(self) -> None:
        self.kept: list[Recorded] = []
        self.num_seen = 0
        self._stride = 1

    def add(self, span: Recorded) -> bool:
        is_kept = self.num_seen % self._stride == 0
        self.num_seen += 1
        if is_kept:
            self.kept.append(span)
        return is_kept

    def halve(self) -> int:
        """How many go."""
        num_before = len(self.kept)
        self._stride *= 2
        self.kept = self.kept[::2]
        return num_before - len(self.kept)
