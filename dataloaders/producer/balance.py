"""Which data-parallel rank trains a finished group: the one that has least to train before it.

Consumes: costs of the groups that a rank queues and has trained. Waits for: nothing. Produces: a
rank for each finished group. Every rank adds up its own queue; of the others' it sees the sums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

# A group moves if that brings its turn forward by more than this share of its own cost. It evens
# the queues whatever it is, and with it groups stay where they are between ranks that are as good.
WORTH_MOVING = 0.125

# Of a group: tokens of its prompt and of each response → what training on it costs, in any unit.
GroupCost = Callable[[int, Sequence[int]], int]


class SharedQueues(Protocol):
    """The ranks' queues of one batch, and groups on their way between them. From any thread."""

    def queued(self) -> Sequence[int]:
        """By rank, the cost of what it has not trained yet."""

    def enqueue(self, rank: int, cost: int) -> None:
        """More for ``rank`` to train; negative: it was trained."""

    def put_group(self, position: int, payload: bytes) -> None:
        """For the rank that is to train the group."""

    def take_group(self, position: int) -> bytes:
        """Once. Raises ``LookupError`` if it is not there."""


class Balance:
    """One rank's view of the queues of one batch.

    ``note`` is for any thread, the rest for one at a time.
    """

    def __init__(self, shared: SharedQueues, rank: int, cost_of: GroupCost) -> None:
        self.shared = shared
        self.rank = rank
        self.cost_of = cost_of
        self._lock = threading.Lock()
        self._untold = 0  # by which this rank's queue has changed

    def note(self, cost: int) -> None:
        """This rank has queued a group, or trained one (negative); told by ``tell``."""
        with self._lock:
            self._untold += cost

    def tell(self) -> None:
        """The other ranks see what was noted."""
        with self._lock:
            change, self._untold = self._untold, 0
        if change:
            self.shared.enqueue(self.rank, change)

    def choose(self, cost: int) -> int:
        """The rank that is to train a group of this cost.

        Another rank's queue holds it from now on; this rank's when it is noted.
        """
        self.tell()
        queued = self.shared.queued()
        least = min(range(len(queued)), key=queued.__getitem__)
        if queued[self.rank] - queued[least] <= WORTH_MOVING * cost:
            return self.rank
        self.shared.enqueue(least, cost)
        return least
