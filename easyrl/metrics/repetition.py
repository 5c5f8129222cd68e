"""Repeated n-grams of a response: what a model that talks in circles has more of."""

from __future__ import annotations

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


def count_ngrams(token_ids: np.ndarray) -> Ngrams:
    """The n-grams of a response, int [R]; none where it has fewer than ``NGRAM`` tokens.

    The share that is repeated is 1 - distinct / all, as in repetition penalties (Demystifying Long
    Chain-of-Thought, arXiv 2502.03373), over tokens for words. An n-gram is known by 64 bits of
    hash: of a million different ones, two are taken for equal once in 4e7 responses.
    """
    if len(token_ids) < NGRAM:
        return Ngrams(0, 0)
    hashes = token_ids.astype(np.uint64)
    length = 1
    while length < NGRAM:  # of two neighbours' hashes, that of twice the length
        hashes = hashes[:-length] * _FACTOR + hashes[length:]
        hashes ^= hashes >> _SHIFT
        hashes *= _MIX
        length *= 2
    hashes.sort()
    return Ngrams(len(hashes), int(np.count_nonzero(hashes[1:] == hashes[:-1])))
