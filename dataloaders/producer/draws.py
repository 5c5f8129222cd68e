"""The positions of the open batch that one data-parallel rank draws, and what all ranks decided.

Consumes: decisions of this rank's producer, and of other ranks. Waits for: a position that may be
drawn (``BatchMembership``) and room for it. Is unblocked by: a decision. Produces: positions, each
for one rank. Belongs to the producer's loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

from easyrl.dataloaders.producer.balance import Balance
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.schema import Decision, Exclusion

POLL_S = 0.01  # between two looks at what other ranks have decided

# The batch has to begin again on all ranks; or the rank that says so will decide nothing any more.
Notice = Literal["withdrawal", "failure"]


class SharedDecisions(Protocol):
    """What the ranks of one batch tell each other while it is open, without a collective."""

    def claim(self) -> int:
        """A number, from 0, that no other call on any rank is given."""

    def publish(
        self,
        position: int,
        accepted: bool,
        exclusion: Exclusion | None = None,
        trains: int | None = None,
    ) -> None:
        """``trains``: another rank that is to train the group."""

    def news(self) -> Sequence[Decision]:
        """What other ranks have published since the last call."""

    def announce(self, notice: Notice, reason: str) -> None: ...

    def announced(self, notice: Notice) -> str | None:
        """The reason, if a rank has announced one; of a failure with the rank."""


class Draws:
    """Hands out the positions that this rank draws, in their order."""

    def __init__(
        self,
        membership: BatchMembership,  # positions that the journal knows are decided in it already
        shared: SharedDecisions | None = None,  # the other ranks; None: there are none
        *,
        # (rank, number of ranks): position p belongs to rank p mod n. None: a rank with room claims
        # the next position that nobody has.
        fixed: tuple[int, int] | None = None,
        room: int | None = None,  # groups of this rank that may be open at a time
        # positions that nobody claims, and whether they are this rank's: the batch had drawn them
        # before it began again, and may do so once more
        kept: Mapping[int, bool] | None = None,
        # told of each exclusion, of any rank; why there are too many of them now, or None
        count: Callable[[int, Exclusion], str | None] = lambda position, exclusion: None,
        # which rank trains what this one has drawn; None: this one
        balance: Balance | None = None,
    ) -> None:
        self.membership = membership
        self._shared = shared
        self._room = room
        self._count = count
        self.balance = balance
        self._claims = shared is not None and fixed is None
        self._open: set[int] = set()  # drawn by this rank and not decided
        self._changed = asyncio.Event()
        kept = kept or {}
        self._kept = sorted((p for p, is_mine in kept.items() if is_mine), reverse=True)
        known = {p for p in range(membership.bound) if membership.is_decided(p)} | kept.keys()
        # This rank's positions that were not decided when the batch began, in order; no end.
        self._undecided = (p for p in itertools.count(*(fixed or (0, 1))) if p not in known)
        self._num_claimed = 0
        # This rank's, and may not be drawn yet. None: to be claimed.
        self._next = None if self._claims else next(self._undecided)
        self.on_change: Callable[[], object] = lambda: None  # after every decision
        # before the decision of a group that another rank hands over to this one
        self.on_handed_over: Callable[[int], Awaitable[object]] = _nowhere
        self.on_notice: Callable[[Notice, str], object] = lambda notice, reason: None  # another's
        self.on_too_many: Callable[[str], object] = lambda problem: None  # ... exclusions

    def __aiter__(self) -> Draws:
        return self

    async def __anext__(self) -> int:
        """Ends when the batch is complete: every drawn position of all ranks is decided."""
        while True:
            await self._hear()
            if self.membership.complete:
                raise StopAsyncIteration
            if (position := self._drawn()) is not None:
                self._open.add(position)
                return position
            self._changed.clear()
            try:
                # Not wait_for: it swallows a cancellation that comes together with the event.
                async with asyncio.timeout(None if self._shared is None else POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    @property
    def first_open(self) -> int:
        """No position before it is this rank's and undecided, whether drawn already or not."""
        assert self._next is not None, "nobody knows what this rank will claim"
        return min(self._open, default=self._next)  # positions are drawn in their order

    def decide(
        self,
        position: int,
        accepted: bool,
        exclusion: Exclusion | None = None,
        trains: int | None = None,
    ) -> None:
        """What became of a position that this rank has drawn; ``trains``: another rank does."""
        self._open.discard(position)
        self._take(Decision(position, accepted, exclusion, trains))
        if self._shared is not None:
            self._shared.publish(position, accepted, exclusion, trains)
        self._tell()

    def announce(self, notice: Notice, reason: str) -> None:
        """To the other ranks, which must not wait for this one's positions."""
        if self._shared is not None:
            self._shared.announce(notice, reason)

    def _drawn(self) -> int | None:
        """The next position for this rank, if there is one that may be drawn."""
        if self._kept and self._kept[-1] < self.membership.bound:
            return self._kept.pop()  # needs no room: it is in the journal
        if self._room is not None and len(self._open) >= self._room:
            return None
        position = self._claim() if self._next is None else self._next
        if position >= self.membership.bound:
            self._next = position
            return None
        self._next = None if self._claims else next(self._undecided)
        return position

    def _claim(self) -> int:
        assert self._shared is not None
        number = self._shared.claim()
        for _ in range(number - self._num_claimed):  # others have claimed these
            next(self._undecided)
        self._num_claimed = number + 1
        return next(self._undecided)

    async def _hear(self) -> None:
        if self._shared is None:
            return
        if self.balance is not None:
            self.balance.tell()
        news = self._shared.news()
        for decision in news:
            if self.balance is not None and decision.trains == self.balance.rank:
                await self.on_handed_over(decision.position)  # it has to be here when it counts
            self._take(decision)
        if news:
            self._tell()
        for notice in ("withdrawal", "failure"):
            if (reason := self._shared.announced(notice)) is not None:
                self.on_notice(notice, reason)

    def _take(self, decision: Decision) -> None:
        self.membership.decide(decision.position, decision.accepted)
        if decision.exclusion is not None:
            if (problem := self._count(decision.position, decision.exclusion)) is not None:
                self.on_too_many(problem)  # before the batch's end is told

    def _tell(self) -> None:
        self.on_change()
        self._changed.set()


async def _nowhere(position: int) -> None:
    raise AssertionError(f"nobody takes the group of position {position}")
