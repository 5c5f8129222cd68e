"""Packing plans: how drained groups are spread over rows, prompts or all beginnings shared.

A plan knows sequences by their places in a list. Both plans have the same two methods: ``rows``,
and ``order_of``, which says how a row of given sequences is packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from easyrl.dataloaders.packing.cost import RowCost
from easyrl.dataloaders.packing.partition import (
    Item,
    Rows,
    balanced,
    in_order,
    neighbours,
    order_cost,
    plan_price,
)
from easyrl.dataloaders.packing.prefix_tree import SharedOrder, lexicographic
from easyrl.dataloaders.packing.row import TrainedSequence


class PromptRows:
    """Responses of a group share its prompt.

    ``groups`` has the sequences of each group, ``budget`` is the tokens of a row; with
    ``whole_groups`` no group is split over rows, also where a row exceeds the budget for it.
    """

    def __init__(
        self,
        sequences: Sequence[TrainedSequence],
        groups: Sequence[Sequence[int]],
        budget: int,
        cost: RowCost,
        whole_groups: bool = False,
    ) -> None:
        self._groups, self._budget, self._cost = groups, budget, cost
        self._whole_groups = whole_groups
        self._lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
        self._prompts = np.array([s.prompt_length for s in sequences], dtype=np.int64)
        self._num_labels = np.array([len(s.trained) for s in sequences], dtype=np.int64)
        self._group = np.repeat(np.arange(len(groups)), [len(members) for members in groups])

    def rows(self, keep_order: bool) -> Rows:
        """Sequences of each row; with ``keep_order`` rows hold groups that follow each other.

        Without, rows are also filled up with parts of groups, prompts repeated, where the rows that
        this saves are worth that (``plan_price``): groups a little larger than half a row would
        leave all rows half empty.
        """
        whole = self._rows_of_groups(keep_order)
        if keep_order or self._whole_groups or len(whole) == 1:
            return whole
        order = self.order_of(np.arange(len(self._group)))
        filled = neighbours(order, self._num_labels, self._budget, self._cost)
        return min(whole, filled, key=self._price)

    def _rows_of_groups(self, keep_order: bool) -> Rows:
        """Groups are whole where they fit into a row."""
        parts = [part for group in range(len(self._groups)) for part in self.parts(group)]
        orders = [self.order_of(part) for part in parts]
        items = [
            Item(order.num_tokens, order_cost(order, self._num_labels, self._cost))
            for order in orders
        ]
        rows = (in_order if keep_order else balanced)(items, self._budget)
        return [sorted(index for item in row for index in parts[item]) for row in rows]

    def parts(self, group: int) -> Rows:
        """The group, or its responses in as many parts as the budget asks for."""
        members = np.array(self._groups[group])
        if self._whole_groups or self.order_of(members).num_tokens <= self._budget:
            return [members.tolist()]
        prompts = self._prompts[members]
        costs = self._cost.tokens(prompts, self._lengths[members])
        costs = costs + self._cost.labels(self._num_labels[members])
        num_tokens = self._lengths[members] - prompts
        items = [Item(*pair) for pair in zip(num_tokens.tolist(), costs.tolist(), strict=True)]
        room = max(1, self._budget - int(prompts[0]))
        return [members[part].tolist() for part in balanced(items, room)]

    def order_of(self, row: Sequence[int] | np.ndarray) -> SharedOrder:
        index = np.array(row)
        group = self._group[index]
        goes_on = np.append(False, group[1:] == group[:-1])
        shared = np.where(goes_on, self._prompts[index], 0)
        return SharedOrder(index, self._lengths[index], shared)

    def _price(self, rows: Rows) -> tuple[float, float]:
        orders = [self.order_of(row) for row in rows]
        return plan_price(orders, self._num_labels, self._budget, self._cost)


class TreeRows:
    """All sequences share what beginnings they have in common. Arguments as ``PromptRows``.

    A row never has more tokens than the same sequences have with prompts shared.
    """

    def __init__(
        self,
        sequences: Sequence[TrainedSequence],
        groups: Sequence[Sequence[int]],
        budget: int,
        cost: RowCost,
        whole_groups: bool = False,
    ) -> None:
        self._groups, self._budget, self._cost = groups, budget, cost
        self._whole_groups = whole_groups
        self._prompt_rows = PromptRows(sequences, groups, budget, cost, whole_groups)
        self._num_labels = np.array([len(s.trained) for s in sequences], dtype=np.int64)
        self._order = lexicographic([s.token_ids for s in sequences])

    def rows(self, keep_order: bool) -> Rows:
        """Sequences of each row; with ``keep_order`` rows hold groups that follow each other."""
        everything = [index for members in self._groups for index in members]
        if not keep_order:
            return self._best(everything, self._prompt_rows.rows(keep_order=False))
        parts = [
            part
            for group, members in enumerate(self._groups)
            for part in self._best(members, self._prompt_rows.parts(group))
        ]
        # What groups share between them comes on top: such rows are less full than they could be.
        items = [Item(self.order_of(part).num_tokens, 0.0) for part in parts]
        rows = in_order(items, self._budget)
        return [sorted(index for item in row for index in parts[item]) for row in rows]

    def order_of(self, row: Sequence[int]) -> SharedOrder:
        wanted = np.zeros(len(self._num_labels), dtype=bool)
        wanted[row] = True
        return self._order.only(wanted)

    def _best(self, members: Sequence[int], prompt_rows: Rows) -> Rows:
        """One row if it holds ``members``; else neighbours in the tree together, or what is best
        with prompts shared, whichever costs less (``plan_price``); the latter for whole groups.
        """
        order = self.order_of(members)
        if order.num_tokens <= self._budget:
            return [list(members)] if members else []
        if self._whole_groups:
            return prompt_rows
        stretches = neighbours(order, self._num_labels, self._budget, self._cost)
        return min(stretches, prompt_rows, key=self._price)

    def _price(self, rows: Rows) -> tuple[float, float]:
        orders = [self.order_of(row) for row in rows]
        return plan_price(orders, self._num_labels, self._budget, self._cost)
