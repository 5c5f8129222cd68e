"""The reward of a response that thinks first and answers then (DeepSeek-R1, arXiv 2501.12948)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from easyrl.schema import Prompt

_THOUGHT = re.compile(r"\s*<think>(.*)</think>(.*)", re.DOTALL)


def format(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    think_in_prompt: bool = False,
) -> list[float]:
    """1.0 where a response is ``<think>…</think>`` followed by an answer, each tag once, else 0.0.

    DeepSeek-R1's format reward (arXiv 2501.12948, §2.2), of the thoughts alone: the paper's prompt
    has the answer in tags, too.
    ``think_in_prompt``: the chat template already wrote ``<think>``, the response starts behind it.
    """
    opening = "<think>" if think_in_prompt else ""
    return [float(_well_formed(opening + text)) for text in texts]


def _well_formed(text: str) -> bool:
    match = _THOUGHT.fullmatch(text)
    once = text.count("<think>") == 1 and text.count("</think>") == 1
    return once and match is not None and bool(match[2].strip())
