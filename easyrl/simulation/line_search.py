"""A number that is best, where to try one takes time: a coarse grid, then what is beside its best.

For a cost that falls up to the best number and rises behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_TRIED = 64  # of a grid without gaps
ON_GRID = 16  # of one with gaps, and a few more


def stride_of(most: int) -> int:
    """Of a grid on 1 to ``most``."""
    return 1 if most <= MOST_TRIED else most // ON_GRID


def search_beside(start: int, stride: int, cost_of: Callable[[int], Any]) -> int:
    """The best number near ``start``, which is the best of a grid of ``stride``.

    Its neighbours are tried at half the stride again and again, down to 1, each time until none of
    them is better. ``cost_of``: asked once for each; compared by ``<``; None: there is no such
    number.
    """
    costs = {start: cost_of(start)}
    best = start
    while stride > 1:
        stride = (stride + 1) // 2
        moved = True
        while moved:
            moved = False
            for number in (best - stride, best + stride):
                if number not in costs:
                    costs[number] = cost_of(number)
                if costs[number] is not None and costs[number] < costs[best]:
                    best, moved = number, True
                    break
    return best
