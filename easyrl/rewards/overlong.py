"""The punishment of a response that comes near to the longest allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from easyrl.schema import Prompt


def overlong(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    max_tokens: PositiveInt,
    buffer: Annotated[float, Field(gt=0, le=1)] = 0.2,
) -> list[float]:
    r"""DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), from 0 down to -1:

    .. math::
        0 \text{ up to } L_{max} - L_{cache}, \text{ then }
        \frac{(L_{max} - L_{cache}) - |y|}{L_{cache}} \text{ up to } L_{max}, \text{ then } -1

    with ``|y|`` the response's tokens, ``L_max = max_tokens`` (write ``${rollout.max_tokens}``) and
    ``L_cache = buffer * max_tokens``; 0.2 is the published 4096 of 20480 tokens. The recipe
    ``dapo`` has it built in.
    """
    lengths = np.array([len(ids) for ids in token_ids], dtype=np.float64)
    punishment: list[float] = overlong_punishment(lengths, max_tokens, buffer).tolist()
    return punishment


def overlong_punishment(lengths: np.ndarray, max_tokens: int, buffer: float) -> np.ndarray:
    """DAPO's eq. 13 of ``lengths`` (tokens, float [G]): float64 [G] from 0 down to -1."""
    cache = buffer * max_tokens
    return np.clip((max_tokens - cache - lengths) / cache, -1.0, 0.0)
