"""Parts of an episode's tree: which turns are trained in which branch, each in exactly one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from easyrl.schema import Completion, Turn


class Part(NamedTuple):
    """The turns of a branch that one endpoint has sampled, and no earlier branch has."""

    turns: tuple[int, ...]  # their numbers, rising
    endpoint: str  # URL


def parts_of(turns: Sequence[Turn]) -> list[Part]:
    """All parts; a turn that several branches go through belongs to the first of them."""
    first_child: dict[int, int] = {}
    for number, turn in enumerate(turns):
        if turn.parent is not None:
            first_child.setdefault(turn.parent, number)
    leaf_of: dict[int, int] = {}
    for number in reversed(range(len(turns))):
        child = first_child.get(number)
        leaf_of[number] = number if child is None else leaf_of[child]
    parts: dict[tuple[int, str], list[int]] = {}
    for number, turn in enumerate(turns):
        parts.setdefault((leaf_of[number], turn.endpoint), []).append(number)
    return [Part(tuple(members), endpoint) for (_, endpoint), members in parts.items()]


def turn_of(turns: Sequence[Turn], tokens: np.ndarray) -> np.ndarray:
    """int64 [n], the number of the turn that each of ``tokens`` (places, int64 [n]) is of."""
    return np.searchsorted([turn.end for turn in turns], tokens, side="right")


def tokens_by_part(completion: Completion, tokens: np.ndarray) -> dict[int, np.ndarray]:
    """Which of ``tokens`` (places, int64 [n], rising) a row has in which part of the completion.

    By the part's number, as ``SampleKey.part`` has it, int64 indices into ``tokens``; parts without
    one are left out. A response that is no episode is one part, 0.
    """
    if completion.episode is None:
        return {0: np.arange(len(tokens))} if len(tokens) else {}
    turns = completion.episode.turns
    of_token = turn_of(turns, tokens)
    chosen = {
        number: np.flatnonzero(np.isin(of_token, part.turns))
        for number, part in enumerate(parts_of(turns))
    }
    return {number: places for number, places in chosen.items() if len(places)}
