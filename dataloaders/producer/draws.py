"""The positions of the open batch that one data-parallel rank draws, and what all ranks decided.

Consumes: decisions of this rank's producer, and of other ranks. Waits for: a position that may be
drawn (``BatchMembership``) and room for it. Is unblocked by: a decision. Produces: positions, each
for one rank. Belongs to the producer's loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from easyrl.dataloaders.producer.membership import BatchMembership

POLL_S = 0.01  # between two looks at what other ranks have decided


class SharedDecisions(Protocol):
    """What the ranks of one batch tell each other while it is open, without a collective."""

    def claim(self) -> int:
        """A number, from 0, that no other call on any rank is given."""
        ...

    def publish(self, position: int, accepted: bool) -> None: ...

    def news(self) -> Sequence[tuple[int, bool]]:
        """Positions with their outcomes that other ranks have published since the last call."""
        ...

    def announce_withdrawal(self, reason: str) -> None:
        """The batch has to begin again, on all ranks."""
        ...

    def withdrawal(self) -> str | None:
        """The reason, if a rank has announced one."""
        ...

    def announce_failure(self, reason: str) -> None:
        """This rank will decide nothing any more."""
        ...

    def failure(self) -> str | None:
        """The rank and its reason, if one has announced it."""
        ...


class OneRank:
    """``SharedDecisions`` of a run with one data-parallel rank."""

    def __init__(self) -> None:
        self._claims = itertools.count()

    def claim(self) -> int:
        return next(self._claims)

    def publish(self, position: int, accepted: bool) -> None:
        pass

    def news(self) -> Sequence[tuple[int, bool]]:
        return ()

    def announce_withdrawal(self, reason: str) -> None:
        pass

    def withdrawal(self) -> str | None:
        return None

    def announce_failure(self, reason: str) -> None:
        pass

    def failure(self) -> str | None:
        return None


class Draws:
    """Hands out the positions that this rank draws, in their order.

    Args:
        membership: of the batch; positions that the journal knows are decided in it already.
        shared: the other ranks.
        fixed: (rank, number of ranks): position p belongs to rank p mod n. None: a rank with room
            claims the next position that nobody has.
        room: groups of this rank that may be open at a time; the claim of a further one waits.
        polls: whether other ranks decide too.
    """

    def __init__(
        self,
        membership: BatchMembership,
        shared: SharedDecisions,
        *,
        fixed: tuple[int, int] | None = None,
        room: int | None = None,
        polls: bool = False,
    ) -> None:
        self.membership = membership
        self._shared = shared
        self._fixed = fixed
        self._room = room
        self._polls = polls
        self._open: set[int] = set()  # drawn by this rank and not decided
        self._changed = asyncio.Event()
        known = [p for p in range(membership.bound) if membership.is_decided(p)]
        self._undecided = _undecided(frozenset(known), fixed)
        self._upcoming = next(self._undecided)  # nothing before it is drawn any more
        self._num_claimed = 0
        self._next: int | None = None  # this rank's, and may not be drawn yet
        self.on_change: Callable[[], object] = lambda: None  # after every decision
        self.on_withdrawal: Callable[[str], object] = lambda reason: None  # another rank's
        self.on_failure: Callable[[str], object] = lambda reason: None  # another rank's

    def __aiter__(self) -> Draws:
        return self

    async def __anext__(self) -> int:
        """Ends when the batch is complete: every drawn position of all ranks is decided."""
        while True:
            self._hear()
            if self.membership.complete:
                raise StopAsyncIteration
            if self._next is None and (self._room is None or len(self._open) < self._room):
                self._next = self._claim()
            if self._next is not None and self._next < self.membership.bound:
                position, self._next = self._next, None
                self._open.add(position)
                return position
            self._changed.clear()
            try:
                # Not wait_for: it swallows a cancellation that comes together with the event.
                async with asyncio.timeout(POLL_S if self._polls else None):
                    await self._changed.wait()
            except TimeoutError:
                pass

    @property
    def first_open(self) -> int:
        """No position before it is this rank's and undecided, whether drawn already or not.

        With claims it is a lower bound: another rank may have the position.
        """
        upcoming = self._upcoming if self._next is None else self._next
        return min(self._open, default=upcoming)  # positions are drawn in their order

    def decide(self, position: int, accepted: bool) -> None:
        """What became of a position that this rank has drawn."""
        self._open.discard(position)
        self.membership.decide(position, accepted)
        self._shared.publish(position, accepted)
        self._tell()

    def give_up(self, reason: str) -> None:
        """This rank's producer has failed: the others must not wait for its positions."""
        self._shared.announce_failure(reason)

    def _claim(self) -> int:
        if self._fixed is not None:
            return self._advance()
        number = self._shared.claim()
        while self._num_claimed < number:  # others have claimed these
            self._advance()
            self._num_claimed += 1
        self._num_claimed += 1
        return self._advance()

    def _advance(self) -> int:
        position, self._upcoming = self._upcoming, next(self._undecided)
        return position

    def _hear(self) -> None:
        news = self._shared.news() if self._polls else ()
        for position, accepted in news:
            self.membership.decide(position, accepted)
        if news:
            self._tell()
        if self._polls and (reason := self._shared.withdrawal()) is not None:
            self.on_withdrawal(reason)
        if self._polls and (reason := self._shared.failure()) is not None:
            self.on_failure(reason)

    def _tell(self) -> None:
        self.on_change()
        self._changed.set()


def _undecided(known: Collection[int], fixed: tuple[int, int] | None) -> Iterator[int]:
    """Positions of this rank that were not decided when the batch began, in order; no end."""
    rank, num_ranks = fixed or (0, 1)
    return (p for p in itertools.count(rank, num_ranks) if p not in known)
