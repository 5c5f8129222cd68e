"""The rewards that both sides are given: of ours through ``rewards: file``, of TRL's by import."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

NO_SIGNAL = "none"  # the answer of a prompt whose responses are all worth the same


def exact(answer: str, text: str, token_ids: Sequence[int]) -> float:
    """Whether what follows ``</think>`` is the answer."""
    return float(text.rpartition("</think>")[2].strip() == answer)


def half(answer: str, text: str, token_ids: Sequence[int]) -> float:
    """The same for prompts with an answer, and a little that differs with the response.

    So a group has a signal unless its prompt has no answer, or all of its responses are the same.
    """
    return 0.0 if answer == NO_SIGNAL else 0.9 * exact(answer, text, ()) + 0.1 * noise(token_ids)


def random(answer: str, text: str, token_ids: Sequence[int]) -> float:
    """Nothing can be learnt from it, and every group has a signal."""
    return noise(token_ids)


def noise(token_ids: Sequence[int]) -> float:
    """From 0 to 1, a function of the tokens."""
    return zlib.crc32(np.asarray(token_ids, dtype=np.int32).tobytes()) / 2**32


REWARDS = {function.__name__: function for function in (exact, half, random)}


def of_group(prompt, texts, token_ids, name):  # type: ignore[no-untyped-def]
    """What the configuration names; ``name`` is one of ``REWARDS``."""
    answer = prompt.answer
    return [REWARDS[name](answer, *response) for response in zip(texts, token_ids, strict=True)]
