"""Rules that put things into rows, against all ways there are."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from easyrl.dataloaders.packing.cost import RowCost
from easyrl.dataloaders.packing.plans import Item, Rows, TreeRows, balanced, in_order
from easyrl.dataloaders.packing.row import TrainedSequence
from easyrl.schema import SampleKey
from tests.dataloaders.packed_rows import BUSY

ITEMS = st.lists(
    st.builds(Item, st.integers(1, 12), st.integers(1, 50).map(float)), min_size=1, max_size=7
)


def fewest_rows(items: list[Item], budget: int) -> int:
    """Of all ways to put items into rows."""
    best = len(items)

    def place(index: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(items):
            best = len(rooms)
            return
        size = min(items[index].num_tokens, budget)  # one that is too large fills a row
        for row, room in enumerate(rooms):
            if room >= size:
                place(index + 1, [*rooms[:row], room - size, *rooms[row + 1 :]])
        place(index + 1, [*rooms, budget - size])

    place(0, [])
    return best


@BUSY
@given(ITEMS, st.integers(1, 20))
def test_balanced_rows_are_few_and_within_the_budget(items: list[Item], budget: int) -> None:
    rows = balanced(items, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(items)))
    assert rows == sorted(sorted(row) for row in rows)
    for row in rows:
        assert sum(items[i].num_tokens for i in row) <= budget or len(row) == 1
    fewest = fewest_rows(items, budget)
    assert fewest <= len(rows) <= (11 * fewest + 6) // 9  # Dósa 2007, tight for first fit


@BUSY
@given(ITEMS, st.integers(1, 20), st.integers(2, 4))
@example([Item(1, 1.0)] * 4 + [Item(2, 1.0)], 2, 4)  # first fit leaves a row empty
def test_more_rows_than_are_needed(items: list[Item], budget: int, min_rows: int) -> None:
    rows = balanced(items, budget, min_rows)
    assert sorted(index for row in rows for index in row) == list(range(len(items)))
    assert len(rows) >= min(min_rows, len(items))
    for row in rows:
        assert sum(items[i].num_tokens for i in row) <= budget or len(row) == 1
    few = balanced(items, budget)
    assert rows == few or len(few) < min_rows


@BUSY
@given(ITEMS, st.integers(1, 20))
def test_rows_in_order_are_closed_only_when_full(items: list[Item], budget: int) -> None:
    rows = in_order(items, budget)
    assert [index for row in rows for index in row] == list(range(len(items)))
    tokens = [sum(items[i].num_tokens for i in row) for row in rows]
    assert all(total <= budget or len(row) == 1 for total, row in zip(tokens, rows, strict=True))
    for total, following in zip(tokens, rows[1:], strict=False):
        assert total + items[following[0]].num_tokens > budget


def test_balanced_is_even_in_cost_and_not_in_tokens() -> None:
    items = [Item(6, 1.0), Item(6, 1.0), Item(4, 9.0), Item(4, 9.0)]
    assert balanced(items, 12) == [[0, 2], [1, 3]]
    assert balanced([Item(5, cost) for cost in (7.0, 5.0, 4.0, 4.0)], 15) == [[0, 3], [1, 2]]


def test_first_fit_where_even_costs_do_not_fit() -> None:
    """LPT would separate the two items of five and leave no room for the last ones."""
    items = [Item(5, 9.0), Item(5, 8.0), Item(4, 1.0), Item(3, 1.0), Item(3, 1.0)]
    assert balanced(items, 10) == [[0, 1], [2, 3, 4]]


def all_stretches(count: int) -> list[list[range]]:
    found = []
    for num_cuts in range(count):
        for cuts in combinations(range(1, count), num_cuts):
            ends = [0, *cuts, count]
            found.append([range(a, b) for a, b in zip(ends, ends[1:], strict=False)])
    return found


@BUSY
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 16),
)
def test_neighbours_are_the_best_stretches(written: list[list[int]], budget: int) -> None:
    """Tokens and pairs counted in a set of beginnings; every way of cutting tried."""
    cost = RowCost(per_token=1.0, per_pair=0.5, per_label=2.0)
    none = np.zeros(0)
    sequences = [
        TrainedSequence(
            SampleKey(0, 0, i), "", np.array(tokens), 1, np.arange(1, len(tokens)), none, none, none
        )
        for i, tokens in enumerate(written)
    ]
    plan = TreeRows(sequences, [range(len(written))], budget, cost)
    order = plan.order

    def beginnings(row: list[int]) -> set[tuple[int, ...]]:
        return {tuple(written[i][:n]) for i in row for n in range(1, len(written[i]) + 1)}

    def row_cost(row: list[int]) -> float:
        nodes = beginnings(row)
        labels = sum(len(written[i]) - 1 for i in row)
        return len(nodes) + 0.5 * sum(map(len, nodes)) + 2.0 * labels

    def price(rows: Rows) -> tuple[int, float]:
        return len(rows), sum(row_cost(row) ** 2 for row in rows)

    def fits(rows: Rows) -> bool:
        return all(len(beginnings(row)) <= budget or len(row) == 1 for row in rows)

    rows = plan.neighbours(order)
    assert fits(rows)
    ways = [
        [[int(order.index[i]) for i in part] for part in way] for way in all_stretches(len(written))
    ]
    assert price(rows) == min(price(way) for way in ways if fits(way))
    for row in rows:
        wanted = np.isin(np.arange(len(written)), row)
        assert plan.cost_of(order.only(wanted)) == row_cost(row)
