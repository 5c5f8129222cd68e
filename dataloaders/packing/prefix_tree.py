"""Token sequences that share beginnings, each beginning once: the tree and its depth-first row.

Sequences stand behind each other so that each shares a beginning with the one before it. Writing
of each only what it does not share gives the tree's tokens, depth first: sequence k adds a *run*,
its tokens from depth ``shared[k]`` on. In lexicographic order nothing is written twice; the
neighbours' shared lengths say all about the tree, as they do in a suffix array (Kasai et al. 2001,
"Linear-time longest-common-prefix computation in suffix arrays").

Shape legend: Q sequences, T tokens of the row. A token's depth is its place in its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from easyrl.schema import Segment


@dataclass(frozen=True)
class SharedOrder:
    """Sequences in an order in which each shares a beginning with the one before it."""

    index: np.ndarray  # int64 [Q], which sequence
    lengths: np.ndarray  # int64 [Q]
    shared: np.ndarray  # int64 [Q], leading tokens that it shares with the one before; 0 at first

    @property
    def num_tokens(self) -> int:
        """T"""
        return int((self.lengths - self.shared).sum())

    def only(self, wanted: np.ndarray) -> SharedOrder:
        """Some of the sequences: ``wanted`` is bool, by sequence as ``index`` names them."""
        places = np.flatnonzero(wanted[self.index])
        # What two sequences share is what all neighbours between them share.
        between = [
            self.shared[a + 1 : b + 1].min() for a, b in zip(places, places[1:], strict=False)
        ]
        shared = np.array([0, *between][: len(places)], dtype=np.int64)
        return SharedOrder(self.index[places], self.lengths[places], shared)


def lexicographic(sequences: Sequence[np.ndarray]) -> SharedOrder:
    """Sequences of token ids in the order that shares most; equal ones as they were given.

    Token ids are not negative and below 2^32.
    """
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]  # they compare as tokens do
    index = sorted(range(len(sequences)), key=keys.__getitem__)
    pairs = zip(index, index[1:], strict=False)
    between = [_num_shared(sequences[a], sequences[b]) for a, b in pairs]
    return SharedOrder(
        np.array(index, dtype=np.int64),
        np.array([len(sequences[i]) for i in index], dtype=np.int64),
        np.array([0, *between][: len(index)], dtype=np.int64),
    )


class PrefixTree:
    """The row of a ``SharedOrder``: where each sequence's tokens stand in it."""

    def __init__(self, order: SharedOrder) -> None:
        self.order = order
        self._counts = order.lengths - order.shared  # [Q], tokens of each run
        self._starts = np.cumsum(self._counts) - self._counts  # [Q], row position of each run
        # [Q], the run that holds a run's parent token; -1 for a root. It is the last one before it
        # that begins at a smaller depth.
        self._owners = _last_smaller(order.shared)
        self._shared, self._owner_of = order.shared.tolist(), self._owners.tolist()
        self._offsets = (self._starts - order.shared).tolist()  # row position less depth, by run

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [T]: how far each token of the row is from the beginning of its sequence."""
        shift = np.repeat(self._starts - self.order.shared, self._counts)
        return np.arange(self.order.num_tokens) - shift

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The tree's unary chains, depth first."""
        order = self.order
        before = np.concatenate([[-1], order.lengths[:-1]])
        # Runs that do not go on behind the token that stands before them in the row.
        branching = np.flatnonzero((self._counts > 0) & (order.shared != before))
        owners = self._owners[branching]
        # Row positions of the tokens behind which they begin; -1 for roots.
        parents = self._starts[owners] + order.shared[branching] - 1 - order.shared[owners]
        parents = np.where(owners < 0, -1, parents)
        begins = np.unique(np.concatenate([self._starts[branching], parents[parents >= 0] + 1]))
        parent_segments = np.arange(len(begins)) - 1
        where = np.searchsorted(begins, self._starts[branching])
        parent_segments[where] = np.searchsorted(begins, parents, side="right") - 1
        lengths = np.diff(begins, append=order.num_tokens)
        triples = zip(begins.tolist(), lengths.tolist(), parent_segments.tolist(), strict=True)
        return tuple(Segment(*triple) for triple in triples)

    def positions(self, place: int, depths: np.ndarray) -> np.ndarray:
        """Row positions of the tokens at ``depths``, rising, of the sequence at ``place``."""
        positions = depths + self._offsets[place]
        num = int(depths.searchsorted(self._shared[place]))
        while num:  # so many stand before the run, in the one behind which it begins
            owner = self._owner_of[place]
            positions[:num] += self._offsets[owner] - self._offsets[place]
            place, num = owner, int(depths[:num].searchsorted(self._shared[owner]))
        return positions


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differing = a[:length] != b[:length]
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length


def _last_smaller(values: np.ndarray) -> np.ndarray:
    """int64 [Q]: for each value the place of the last smaller one before it, or -1."""
    numbers = values.tolist()
    places = np.full(len(numbers), -1)
    rising: list[int] = []  # places whose values rise
    for place, number in enumerate(numbers):
        while rising and numbers[rising[-1]] >= number:
            rising.pop()
        if rising:
            places[place] = rising[-1]
        rising.append(place)
    return places
