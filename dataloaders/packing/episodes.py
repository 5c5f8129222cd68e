"""Sequences of an episode: its tree's branches, each trained token in exactly one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from easyrl.episodes.branches import parts_of, tokens_by_part, turn_of
from easyrl.schema import Completion, Turn


class BranchPart(NamedTuple):
    """The turns of a branch that one endpoint has sampled, and no earlier branch has."""

    number: int  # of the episode's parts, whichever tokens are trained
    endpoint: str  # URL
    token_ids: np.ndarray  # int32, from the branch's root to the last trained token
    chosen: np.ndarray  # int64 [n], which of the trained tokens these are
    trained: np.ndarray  # int64 [n], their places in ``token_ids``


def branch_parts(completion: Completion, tokens: np.ndarray) -> list[BranchPart]:
    """The parts of an episode in which one of ``tokens`` is; int64 [n], places, rising.

    A turn that several branches go through belongs to the first of them.
    """
    assert completion.episode is not None
    turns = completion.episode.turns
    of_token = turn_of(turns, tokens)
    all_parts = parts_of(turns)
    parts = []
    for number, chosen in tokens_by_part(completion, tokens).items():
        members, endpoint = all_parts[number]
        path = _path(turns, members[-1])
        starts = dict(zip(path, _offsets(turns, path), strict=True))
        shift = np.array([starts[int(t)] - turns[int(t)].start for t in of_token[chosen]])
        trained = tokens[chosen] + shift
        branch = np.concatenate([completion.token_ids[turns[t].start : turns[t].end] for t in path])
        parts.append(BranchPart(number, endpoint, branch[: trained[-1] + 1], chosen, trained))
    return parts


def _path(turns: Sequence[Turn], number: int) -> list[int]:
    """From the root to turn ``number``."""
    path = [number]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _offsets(turns: Sequence[Turn], path: Sequence[int]) -> list[int]:
    """Where each turn of ``path`` begins in it."""
    lengths = [turns[t].end - turns[t].start for t in path]
    return [sum(lengths[:i]) for i in range(len(lengths))]
