"""Bin packing: items into as few rows as possible, of even cost.

All rules are functions of their arguments alone. A row keeps to the token budget unless one thing
alone exceeds it, which then has a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from easyrl.dataloaders.packing.cost import RowCost
from easyrl.dataloaders.packing.prefix_tree import SharedOrder

Rows = list[list[int]]  # of indices; each row in rising order

# What a row takes whatever is in it (weights read, or gathered from other ranks; launches), set to
# the linear layers' work on this share of a full row's tokens. An assumption: models differ.
ROW_OVERHEAD = 1 / 8


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


def neighbours(order: SharedOrder, num_labels: np.ndarray, budget: int, cost: RowCost) -> Rows:
    """Stretches of ``order``: as few as possible, and of these the least sum of squared costs.

    A cut makes the next row begin with what its first sequence shared with the one before it, which
    costs. So squares ask for both: rows of even cost, and cuts where little is shared.
    ``num_labels`` int [Q] is by sequence, as ``order.index`` names them.
    """
    labels = cost.labels(num_labels[order.index])
    own_cost = cost.tokens(np.zeros_like(order.lengths), order.lengths) + labels
    # Of a stretch [i, j): what i costs alone, and what each later one adds to its neighbour.
    added_tokens = np.cumsum(np.append(0, order.lengths - order.shared))
    added_cost = np.cumsum(np.append(0.0, cost.tokens(order.shared, order.lengths) + labels))
    tokens_less = order.lengths - added_tokens[1:]
    cost_less = own_cost - added_cost[1:]
    num_rows = np.zeros(len(order.index) + 1, dtype=np.int64)  # best up to each place
    squares = np.zeros(len(order.index) + 1)
    begin_of = np.zeros(len(order.index) + 1, dtype=np.int64)  # of the best last stretch
    first = 0
    for end in range(1, len(order.index) + 1):
        while first < end - 1 and tokens_less[first] + added_tokens[end] > budget:
            first += 1
        # The count never falls with the place, so the fewest rows are those of ``first``.
        last = int(np.searchsorted(num_rows[:end], num_rows[first], side="right"))
        total = squares[first:last] + (cost_less[first:last] + added_cost[end]) ** 2
        begin = first + int(total.argmin())
        num_rows[end] = num_rows[begin] + 1
        squares[end] = total[begin - first]
        begin_of[end] = begin
    rows: Rows = []
    end = len(order.index)
    while end:
        rows.append(sorted(order.index[begin_of[end] : end].tolist()))
        end = int(begin_of[end])
    return sorted(rows)


def plan_price(
    rows: Iterable[SharedOrder], num_labels: np.ndarray, budget: int, cost: RowCost
) -> tuple[float, float]:
    """The less, the better: cost of all rows with ``ROW_OVERHEAD`` for each, then of even rows.

    A plan that repeats beginnings so as to fill its rows is worth it up to an eighth of a full row
    for each row that it saves. ``num_labels`` is as in ``neighbours``.
    """
    costs = [order_cost(row, num_labels, cost) for row in rows]
    overhead = len(costs) * ROW_OVERHEAD * budget * cost.per_token
    return sum(costs) + overhead, sum(cost**2 for cost in costs)


def order_cost(order: SharedOrder, num_labels: np.ndarray, cost: RowCost) -> float:
    """Of one row that holds all of ``order``; ``num_labels`` as in ``neighbours``."""
    labels = cost.labels(num_labels[order.index])
    return float((cost.tokens(order.shared, order.lengths) + labels).sum())
