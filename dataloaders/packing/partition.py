"""Bin packing: items into as few rows as possible, of even cost.

All rules are functions of their arguments alone. A row keeps to the token budget unless one thing
alone exceeds it, which then has a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Rows = list[list[int]]  # of indices; each row in rising order


class Item(NamedTuple):
    """Something that stays in one row and shares nothing with others."""

    num_tokens: int
    cost: float


def in_order(items: Sequence[Item], budget: int) -> Rows:
    """Consecutive items, a row closed when the next one has no room."""
    rows: Rows = []
    room = 0
    for index, item in enumerate(items):
        if not rows or item.num_tokens > room:
            rows.append([])
            room = budget
        rows[-1].append(index)
        room -= item.num_tokens
    return rows


def balanced(items: Sequence[Item], budget: int) -> Rows:
    """Any items together; rows come in the order of their first items.

    For each number of rows from the smallest conceivable on: the costliest item first, always into
    the cheapest row that has room (LPT: Graham 1969, "Bounds on multiprocessing timing anomalies");
    where that does not work out, the largest item first, into the first row that has room (first
    fit decreasing, which needs at most 11/9 of the fewest rows).
    """
    too_large = [i for i, item in enumerate(items) if item.num_tokens > budget]
    others = [i for i, item in enumerate(items) if item.num_tokens <= budget]
    by_cost = sorted(others, key=lambda i: (-items[i].cost, i))
    by_size = sorted(others, key=lambda i: (-items[i].num_tokens, i))
    count = -(-sum(items[i].num_tokens for i in others) // budget)
    while True:
        rows = _fill(items, by_cost, budget, count, cheapest=True)
        rows = rows or _fill(items, by_size, budget, count, cheapest=False)
        if rows is not None:
            return sorted([sorted(row) for row in (*rows, *([i] for i in too_large)) if row])
        count += 1


def _fill(
    items: Sequence[Item], order: Sequence[int], budget: int, count: int, *, cheapest: bool
) -> Rows | None:
    """Each item into a row with room, the cheapest or else the first; None if one has no room."""
    rows: Rows = [[] for _ in range(count)]
    room, costs = [budget] * count, [0.0] * count
    for index in order:
        item = items[index]
        fitting = [r for r in range(count) if room[r] >= item.num_tokens]
        if not fitting:
            return None
        row = min(fitting, key=lambda r: (costs[r], r)) if cheapest else fitting[0]
        rows[row].append(index)
        room[row] -= item.num_tokens
        costs[row] += item.cost
    return rows
