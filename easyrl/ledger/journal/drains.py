"""What the trainer took together in an earlier attempt, to be taken together again.

The order in which groups are trained, which of them share a row, and which responses went through
the frozen models ahead of it, in which pieces, decide the last bits of the weights; the weights of
every later batch depend on them, and with them its journalled groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from easyrl.ledger.journal.codec import DrainRecord
from easyrl.schema import Key


def last_drains(drains: Iterable[DrainRecord]) -> list[DrainRecord]:
    """Of one rank in one attempt: those since the batch began again for the last time."""
    drains = list(drains)
    last = max((drain.restart for drain in drains), default=0)
    return [drain for drain in drains if drain.restart == last]


def usable_drains(
    drains: Iterable[DrainRecord], updates: Mapping[Key, int | None]
) -> list[DrainRecord]:
    """Those that can be repeated, up to the first that cannot.

    ``updates``: of each group that is there, the optimizer step that takes it, if that is certain.
    """
    usable: list[DrainRecord] = []
    left = dict(updates)
    for drain in drains:
        if any(left.pop(key, None) != drain.update for key in drain.keys):
            break
        usable.append(drain)
    return usable


def longest(attempts: Iterable[Sequence[DrainRecord]]) -> Sequence[DrainRecord]:
    """Of the latest attempt that took most: one that ended early has only begun to repeat them."""
    return max(reversed(list(attempts)), key=num_groups, default=())


def num_groups(drains: Sequence[DrainRecord]) -> int:
    """Groups in all ``drains``."""
    return sum(len(drain.keys) for drain in drains)
