"""What the trainer took together in an earlier life, to be taken together again.

The order in which groups are trained, which of them share a row, and which responses went through
the frozen models ahead of it, in which pieces, decide the last bits of the weights; the weights of
every later batch depend on them, and with them its journalled groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from easyrl.ledger.journal.codec import TakenRecord
from easyrl.schema import Key


def usable_takes(
    takes: Iterable[TakenRecord], keys: Collection[Key], finished: Collection[Key]
) -> list[TakenRecord]:
    """Those of a stream of the prompts ``keys``, up to the first that it cannot repeat.

    Streams of one batch share a file: takes without any of ``keys`` are another's.
    """
    usable: list[TakenRecord] = []
    left = set(keys)
    for take in takes:
        if not any(key in keys for key in take.keys):
            continue
        if not all(key in left and key in finished for key in take.keys):
            break
        left.difference_update(take.keys)
        usable.append(take)
    return usable


def longest(lives: Iterable[Sequence[TakenRecord]]) -> Sequence[TakenRecord]:
    """Of the latest life that took most: one that ended early has only begun to repeat them."""
    most: Sequence[TakenRecord] = ()
    for takes in lives:
        if num_groups(takes) >= num_groups(most):
            most = takes
    return most


def num_groups(takes: Sequence[TakenRecord]) -> int:
    """Groups in all ``takes``."""
    return sum(len(take.keys) for take in takes)
