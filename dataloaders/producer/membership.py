"""Which prompts make up the open batch: position p is drawn when p < B + R (docs/on_policy.md).

Positions count what closed batches have left of the prompt order, from 0. R counts the prompts of
the batch that are rejected or excluded, of all ranks. Nothing is cancelled, and whatever the order
in which groups finish, what is drawn in the end is the shortest prefix of the order that holds B
accepted groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import KW_ONLY, dataclass

from easyrl.schema import EndedBy


@dataclass(eq=False)
class BatchMembership:
    """The rule, for one batch. Knows neither prompts, ranks nor threads.

    Update j takes the accepted groups number ``j B / k`` to ``(j + 1) B / k - 1`` of the order.
    """

    batch_size: int  # B, accepted groups
    num_updates: int = 1  # k, optimizer steps on the batch
    _: KW_ONLY
    num_left: int | None = None  # prompts that the order still has; None: it goes on for ever
    max_draws: int | None = None  # prompts that the batch may draw at most

    def __post_init__(self) -> None:
        assert self.batch_size % self.num_updates == 0
        self._update_size = self.batch_size // self.num_updates
        self._limits = [n for n in (self.num_left, self.max_draws) if n is not None]
        self._outcomes: dict[int, bool] = {}
        self._decided: list[int] = []  # positions, ascending
        self._replaced: list[int] = []  # of these the refused ones: R
        self._prefix = 0  # all positions before it are decided

    def decide(self, position: int, accepted: bool) -> None:
        """The outcome of a drawn position. Told again, it has to be the same."""
        assert position < self.bound, f"position {position} is not drawn"
        if position in self._outcomes:
            assert self._outcomes[position] == accepted, (
                f"position {position} was decided otherwise"
            )
            return
        self._outcomes[position] = accepted
        insort(self._decided, position)
        if not accepted:
            insort(self._replaced, position)
        while self._prefix in self._outcomes:
            self._prefix += 1

    def is_decided(self, position: int) -> bool:
        return position in self._outcomes

    @property
    def bound(self) -> int:
        """Positions below it may be drawn: B + R, unless the order or ``max_draws`` ends before."""
        return min([self.batch_size + len(self._replaced), *self._limits])

    @property
    def complete(self) -> bool:
        """Every drawn position is decided, and nothing may be drawn any more."""
        return self._prefix == self.bound

    @property
    def num_undecided(self) -> int:
        """Positions that may be drawn, of all ranks, and have no outcome yet."""
        return self.bound - len(self._decided)

    @property
    def num_accepted(self) -> int:
        return len(self._decided) - len(self._replaced)

    @property
    def ended_by(self) -> EndedBy:
        """Of a complete batch: what ended it."""
        assert self.complete
        if self.num_accepted == self.batch_size:
            return "accepted"
        return "data" if self.bound == self.num_left else "max_draws"

    def update_of(self, position: int) -> int | None:
        """The update that takes the group of ``position``, if accepted; None: not certain yet.

        It is certain when all undecided positions before it, accepted or not, give the same.
        """
        if self.num_updates == 1:
            return 0
        num_refused = bisect_left(self._replaced, position)
        first = bisect_left(self._decided, position) - num_refused
        update = first // self._update_size
        return update if update == (position - num_refused) // self._update_size else None

    def expected_update_of(self, position: int) -> int:
        """Its update if nothing were refused."""
        return min(position // self._update_size, self.num_updates - 1)

    @property
    def num_known_updates(self) -> int:
        """Updates whose groups are all decided."""
        if self.complete:
            return -(-self.num_accepted // self._update_size)
        num_accepted = self._prefix - bisect_left(self._replaced, self._prefix)
        return num_accepted // self._update_size
