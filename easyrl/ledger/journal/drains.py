"""What the trainer took together in an earlier attempt, to be taken together again.

The order in which groups are trained, which of them share a row, and which responses went through
the frozen models ahead of it, in which pieces, decide the last bits of the weights; the weights of
every later batch depend on them, and with them its journalled groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from easyrl.ledger.journal.codec import DrainRecord
from easyrl.schema import Key


def usable_drains(drains: Iterable[DrainRecord], groups: Collection[Key]) -> list[DrainRecord]:
    """Those that can be repeated with ``groups``, up to the first that cannot."""
    usable: list[DrainRecord] = []
    left = set(groups)
    for drain in drains:
        if not left.issuperset(drain.keys):
            break
        left.difference_update(drain.keys)
        usable.append(drain)
    return usable


def longest(attempts: Iterable[Sequence[DrainRecord]]) -> Sequence[DrainRecord]:
    """Of the latest attempt that took most: one that ended early has only begun to repeat them."""
    most: Sequence[DrainRecord] = ()
    for drains in attempts:
        if num_groups(drains) >= num_groups(most):
            most = drains
    return most


def num_groups(drains: Sequence[DrainRecord]) -> int:
    """Groups in all ``drains``."""
    return sum(len(drain.keys) for drain in drains)
