"""How a turn of an episode is sampled: as training samples or shorter, with a seed of its own."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np

from easyrl.config import SamplingConfig


def narrowed(
    own: SamplingConfig,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> SamplingConfig:
    """``own`` with a turn's limits besides; ``own`` itself where they change nothing."""
    changed: dict[str, object] = {}
    if max_tokens is not None and max_tokens < own.max_tokens:
        changed["max_tokens"] = max_tokens
        changed["min_tokens"] = min(own.min_tokens, max_tokens)
    if more := [text for text in stop if text not in own.stop]:
        changed["stop"] = [*own.stop, *more]
    if more_ids := [token for token in stop_token_ids if token not in own.stop_token_ids]:
        changed["stop_token_ids"] = [*own.stop_token_ids, *more_ids]
    return own.model_copy(update=changed) if changed else own


class TurnSeeds:
    """The seeds of an episode's turns: the same after a restart, in whatever order turns are asked
    for, and another one where the same is asked again."""

    def __init__(self, sample_seed: int) -> None:
        self._sample_seed = sample_seed
        self._num_asked: Counter[bytes] = Counter()  # by digest of the prompt

    def next(self, prompt_ids: np.ndarray) -> int:
        """Of a turn behind ``prompt_ids``, int32 [P]."""
        digest = hashlib.blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=16).digest()
        number = self._num_asked[digest]
        self._num_asked[digest] += 1
        key = f"{self._sample_seed}:{digest.hex()}:{number}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1
