"""Repeated n-grams of a response: what a model that talks in circles has more of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Tokens of an n-gram, a power of 2: longer than what mathematics and code say twice in passing (a
# term, a line), shorter than a sentence or two that a response goes round in.
NGRAM = 16

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, as the other; of splitmix64 and xxh64
_MIX = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(29)


class Ngrams(NamedTuple):
    """Of one response, or sums over several."""

    num: int
    num_repeated: int  # that have come before in their response


def count_ngrams(responses: Sequence[np.ndarray]) -> Ngrams:
    """The n-grams of responses, each int [R]; of one with fewer than ``NGRAM`` tokens none.

    The share that is repeated is 1 - distinct / all, as in repetition penalties (Demystifying Long
    Chain-of-Thought, arXiv 2502.03373), over tokens for words. An n-gram is known by 64 bits of
    hash: of a million different ones, two are taken for equal once in 4e7 responses.
    """
    lengths = np.array([len(token_ids) for token_ids in responses], dtype=np.int64)
    if lengths.max(initial=0) < NGRAM:
        return Ngrams(0, 0)
    hashes = np.concatenate(responses).astype(np.uint64)  # numpy's calls cost most: one for all
    length = 1
    while length < NGRAM:  # of two neighbours' hashes, that of twice the length
        hashes = _mixed(hashes[:-length] * _FACTOR + hashes[length:])
        length *= 2
    response_of = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    first, last = response_of[: len(hashes)], response_of[NGRAM - 1 :]
    within = np.flatnonzero(first == last)  # those that cross no border
    hashes = _mixed(hashes[within] + first[within] * _FACTOR)  # equal ones of two responses differ
    hashes.sort()
    return Ngrams(len(hashes), int(np.count_nonzero(hashes[1:] == hashes[:-1])))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """``numbers``, mixed in place; different ones stay different."""
    numbers ^= numbers >> _SHIFT
    numbers *= _MIX
    return numbers
