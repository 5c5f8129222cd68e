"""Packing plans: how drained groups are spread over rows, prompts or all beginnings shared.

All rules are functions of their arguments alone. A row keeps to the token budget unless one thing
alone exceeds it, which then has a row of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from easyrl.dataloaders.packing.cost import RowCost
from easyrl.dataloaders.packing.prefix_tree import SharedOrder, lexicographic
from easyrl.dataloaders.packing.row import TrainedSequence

# What a row takes whatever is in it (weights read, or gathered from other ranks; launches), set to
# the linear layers' work on this share of a full row's tokens. An assumption: models differ.
ROW_OVERHEAD = 1 / 8
LEAST_TOKENS = 256  # of a row that is made for a thread of its own

Rows = list[list[int]]  # of indices; each row in rising order


class Item(NamedTuple):
    """Something that stays in one row and shares nothing with others."""

    num_tokens: int
    cost: float


@dataclass
class RowPlan(ABC):
    """How sequences, known by their places in a list, are spread over rows."""

    sequences: Sequence[TrainedSequence]
    groups: Sequence[Sequence[int]]  # sequences of each
    budget: int  # tokens of a row
    cost: RowCost
    whole_groups: bool = False  # none is split over rows, also where a row exceeds the budget
    min_rows: int = 1  # where there is something for each, and the order need not be kept

    def __post_init__(self) -> None:
        self.lengths = np.array([len(s.token_ids) for s in self.sequences], dtype=np.int64)
        self.prompts = np.array([s.prompt_length for s in self.sequences], dtype=np.int64)
        self.group_of = np.repeat(np.arange(len(self.groups)), [len(g) for g in self.groups])
        num_labels = np.array([len(s.trained) for s in self.sequences], dtype=np.int64)
        self.label_costs = self.cost.per_label * num_labels

    @abstractmethod
    def rows(self, keep_order: bool) -> Rows:
        """Sequences of each row; with ``keep_order`` rows hold groups that follow each other."""

    @abstractmethod
    def order_of(self, row: Sequence[int] | np.ndarray) -> SharedOrder:
        """How a row of these sequences is packed."""

    def filled(self, parts: Rows, keep_order: bool) -> Rows:
        """Rows of whole ``parts``."""
        orders = [self.order_of(part) for part in parts]
        items = [Item(o.num_tokens, self.cost_of(o)) for o in orders]
        if keep_order:
            rows = in_order(items, self.budget)
        else:
            enough = sum(item.num_tokens for item in items) // LEAST_TOKENS
            rows = balanced(items, self.budget, min(self.min_rows, enough))
        return [sorted(index for item in row for index in parts[item]) for row in rows]

    def neighbours(self, order: SharedOrder) -> Rows:
        """Stretches of ``order``: as few as possible, and of these the least sum of squared costs.

        A cut makes the next row begin with what its first sequence shared with the one before it,
        which costs. So squares ask for both: rows of even cost, and cuts where little is shared.
        """
        labels = self.label_costs[order.index]
        own_cost = self.cost.tokens(np.zeros_like(order.lengths), order.lengths) + labels
        costs = self.cost.tokens(order.shared, order.lengths) + labels
        # Of a stretch [i, j): what i costs alone, and what each later one adds to its neighbour.
        added_tokens = np.cumsum(np.append(0, order.lengths - order.shared))
        added_cost = np.cumsum(np.append(0.0, costs))
        tokens_less = order.lengths - added_tokens[1:]
        cost_less = own_cost - added_cost[1:]
        num_rows = np.zeros(len(order.index) + 1, dtype=np.int64)  # best up to each place
        squares = np.zeros(len(order.index) + 1)
        begin_of = np.zeros(len(order.index) + 1, dtype=np.int64)  # of the best last stretch
        first = 0
        for end in range(1, len(order.index) + 1):
            while first < end - 1 and tokens_less[first] + added_tokens[end] > self.budget:
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

    def price(self, rows: Rows) -> tuple[float, float]:
        """The less, the better: cost of all rows with ``ROW_OVERHEAD`` for each, then of even rows.

        A plan that repeats beginnings so as to fill its rows is worth it up to an eighth of a full
        row for each row that it saves.
        """
        costs = [self.cost_of(self.order_of(row)) for row in rows]
        overhead = len(costs) * ROW_OVERHEAD * self.budget * self.cost.per_token
        return sum(costs) + overhead, sum(cost**2 for cost in costs)

    def cost_of(self, order: SharedOrder) -> float:
        """Of one row that holds all of ``order``."""
        costs = self.cost.tokens(order.shared, order.lengths) + self.label_costs[order.index]
        return float(costs.sum())


class PromptRows(RowPlan):
    """Responses of a group share its prompt."""

    def rows(self, keep_order: bool) -> Rows:
        """Without ``keep_order`` rows are also filled up with parts of groups, prompts repeated,
        where the rows that this saves are worth that: groups a little larger than half a row would
        leave all rows half empty.
        """
        parts = [part for members in self.groups for part in self.parts(members)]
        whole = self.filled(parts, keep_order)
        if keep_order or self.whole_groups or len(whole) <= self.min_rows:
            return whole
        everything = self.order_of(np.arange(len(self.sequences)))
        return min(whole, self.neighbours(everything), key=self.price)

    def parts(self, group: Sequence[int]) -> Rows:
        """The group, or its responses in as many parts as the budget asks for."""
        members = np.array(group)
        if self.whole_groups or self.order_of(members).num_tokens <= self.budget:
            return [members.tolist()]
        prompts = self.prompts[members]
        costs = self.cost.tokens(prompts, self.lengths[members]) + self.label_costs[members]
        num_tokens = self.lengths[members] - prompts
        items = [Item(*pair) for pair in zip(num_tokens.tolist(), costs.tolist(), strict=True)]
        room = max(1, self.budget - int(prompts[0]))
        return [members[part].tolist() for part in balanced(items, room)]

    def order_of(self, row: Sequence[int] | np.ndarray) -> SharedOrder:
        index = np.array(row)
        group = self.group_of[index]
        goes_on = np.append(False, group[1:] == group[:-1])
        shared = np.where(goes_on, self.prompts[index], 0)
        return SharedOrder(index, self.lengths[index], shared)


class TreeRows(RowPlan):
    """All sequences share what beginnings they have in common.

    A row never has more tokens than the same sequences have with prompts shared.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.with_prompts = PromptRows(
            self.sequences,
            self.groups,
            self.budget,
            self.cost,
            self.whole_groups,
            self.min_rows,
        )
        self.order = lexicographic([s.token_ids for s in self.sequences])

    def rows(self, keep_order: bool) -> Rows:
        if not keep_order:
            everything = [index for members in self.groups for index in members]
            with_prompts = self.with_prompts.rows(keep_order=False)
            if len(with_prompts) <= self.min_rows:
                return with_prompts
            return self.best(everything, with_prompts)
        parts = [
            part
            for members in self.groups
            for part in self.best(members, self.with_prompts.parts(members))
        ]
        # What groups share between them comes on top: such rows are less full than they could be.
        return self.filled(parts, keep_order=True)

    def order_of(self, row: Sequence[int] | np.ndarray) -> SharedOrder:
        wanted = np.zeros(len(self.sequences), dtype=bool)
        wanted[row] = True
        return self.order.only(wanted)

    def best(self, members: Sequence[int], prompt_rows: Rows) -> Rows:
        """One row if it holds ``members``; else neighbours in the tree together, or what is best
        with prompts shared, whichever costs less (``price``); the latter for whole groups.
        """
        order = self.order_of(members)
        if order.num_tokens <= self.budget:
            return [list(members)] if members else []
        if self.whole_groups:
            return prompt_rows
        return min(self.neighbours(order), prompt_rows, key=self.price)


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


def balanced(items: Sequence[Item], budget: int, min_rows: int = 1) -> Rows:
    """Any items together; rows come in the order of their first items.

    For each number of rows from ``min_rows`` or the smallest conceivable on: the costliest item
    first, always into the cheapest row that has room (LPT: Graham 1969, "Bounds on multiprocessing
    timing anomalies"); where that does not work out, the largest item first, into the first row
    that has room (first fit decreasing, which needs at most 11/9 of the fewest rows).
    """
    too_large = [i for i, item in enumerate(items) if item.num_tokens > budget]
    others = [i for i, item in enumerate(items) if item.num_tokens <= budget]
    by_cost = sorted(others, key=lambda i: (-items[i].cost, i))
    by_size = sorted(others, key=lambda i: (-items[i].num_tokens, i))
    fewest = -(-sum(items[i].num_tokens for i in others) // budget)
    count = max(fewest, min_rows - len(too_large))
    while True:
        rows = _fill(items, by_cost, budget, count, cheapest=True)
        rows = rows or _fill(items, by_size, budget, count, cheapest=False)
        if rows is not None:
            _leave_none_empty(rows)
            return sorted([sorted(row) for row in (*rows, *([i] for i in too_large)) if row])
        count += 1


def _leave_none_empty(rows: Rows) -> None:
    """As far as there are items: first fit may need fewer rows than it was given."""
    for row in rows:
        if not row and len(longest := max(rows, key=len)) > 1:
            row.append(longest.pop())


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
