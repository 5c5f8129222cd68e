"""The punishment of a response that repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import PositiveInt

from easyrl.schema import Prompt


def repetition(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    ngram_size: PositiveInt = 40,
) -> list[float]:
    """Minus the share of a response's n-grams that occurred before in it, from 0 to almost -1.

    ``distinct / all - 1`` over the n-grams of ``ngram_size`` tokens, 0.0 for a response that is
    shorter: the n-gram penalty of Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in
    LLMs" (arXiv 2502.03373), as its authors' code has it for a whole response, on token ids instead
    of words; its factor is the reward's ``weight``. The default size is not from there.
    """
    return [_share_distinct(ids, ngram_size) - 1.0 for ids in token_ids]


def _share_distinct(token_ids: np.ndarray, size: int) -> float:
    num_ngrams = len(token_ids) - size + 1
    if num_ngrams < 1:
        return 1.0
    ids = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    return len({ids[4 * at : 4 * (at + size)] for at in range(num_ngrams)}) / num_ngrams
