"""The reward of a response as long as its prompt asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveFloat

from easyrl.schema import Prompt

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def length_target(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    alpha: PositiveFloat = 0.0003,
    field: str = "target_tokens",
    end_of_thought: TokenIds | None = None,
) -> list[float]:
    r"""How far a response's length is from its target (INTELLECT-2, arXiv 2505.07291, §3.1.2):

    .. math:: -\alpha \, |l_{target} - l_y|

    with the target ``prompt.metadata[field]`` and ``l_y`` the response's length, both in tokens,
    and ``alpha`` as published (§4.1). With ``end_of_thought``, the token ids of ``</think>``, the
    tokens before their first occurrence are counted instead, all if there is none.

    Raises ``ValueError`` if the prompt has no target.
    """
    if not texts:
        return []
    target = _target(prompt, field)
    lengths = [_length(ids, end_of_thought) for ids in token_ids]
    return [-alpha * abs(target - length) for length in lengths]


def check_prompt(prompt: Prompt, *, field: str = "target_tokens", **_: Any) -> None:
    """Raises ``ValueError`` if the prompt has no target."""
    _target(prompt, field)


def _target(prompt: Prompt, field: str) -> int:
    target = prompt.metadata.get(field)
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise ValueError(
            f"{field!r} of the prompt is {target!r}; it must be a number of tokens from 1: give "
            f"data.template_values.{field}, or a field of each record"
        )
    return target


def _length(token_ids: np.ndarray, end_of_thought: list[int] | None) -> int:
    size = len(end_of_thought or ())
    if end_of_thought is None or len(token_ids) < size:
        return len(token_ids)
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, size)
    found = np.flatnonzero((windows == end_of_thought).all(axis=1))
    return int(found[0]) if len(found) else len(token_ids)
