"""Ranges of a tensor's elements against lists of all their places."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from easyrl.engines.base import Columns
from easyrl.engines.state_ranges import StateRange, common

Ranges = tuple[StateRange, StateRange]


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    """Two of one matrix, each of all columns, told or not, or of some."""
    rows, of = draw(st.integers(1, 6)), draw(st.integers(1, 7))

    def one() -> StateRange:
        columns = None
        if draw(st.booleans()):
            first = draw(st.integers(0, of - 1))
            columns = Columns(first, draw(st.integers(1, of - first)), of)
        total = rows * (of if columns is None else columns.width)
        start = draw(st.integers(0, total))
        return StateRange(start, draw(st.integers(0, total - start)), columns)

    return one(), one()


def places(some: StateRange) -> list[int]:
    """In the whole flattened tensor."""
    first, width, of = some.columns or Columns(0, 1, 1)
    numbers = range(some.start, some.start + some.numel)
    return [number // width * of + first + number % width for number in numbers]


@given(ranges())
def test_what_is_in_both_is_copied_once_and_to_its_place(both: Ranges) -> None:
    saved, wanted = both
    stored, target = torch.tensor(places(saved)), torch.full((wanted.numel,), -1)
    times = torch.zeros(wanted.numel, dtype=torch.int64)
    for block in common(saved, wanted):
        block.of_wanted(target).copy_(block.of_stored(stored[block.stored]))
        block.of_wanted(times).add_(1)
    known = set(places(saved))
    assert target.tolist() == [place if place in known else -1 for place in places(wanted)]
    assert times.tolist() == [int(place in known) for place in places(wanted)]


@given(ranges())
def test_the_end_and_what_lies_in_another(both: Ranges) -> None:
    saved, wanted = both
    if saved.numel > 0:
        assert saved.end_in_tensor == places(saved)[-1] + 1
    if wanted.lies_in(saved):
        first = wanted.start - saved.start
        assert places(saved)[first : first + wanted.numel] == places(wanted)
    elif saved.columns == wanted.columns and wanted.numel > 0:
        assert not set(places(wanted)) <= set(places(saved))
