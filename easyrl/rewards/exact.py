"""The reward of an answer that must be written exactly as the dataset has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from easyrl.schema import Prompt

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def check_prompt(prompt: Prompt, **_: Any) -> None:
    """Raises ``ValueError`` if the prompt has no answer."""
    if prompt.answer is None:
        raise ValueError(f"prompt {prompt.index} has no answer; set data.fields.answer")


def exact(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    pattern: str | None = None,
    ignore_case: bool = False,
) -> list[float]:
    """1.0 where a response's answer equals ``prompt.answer``, else 0.0.

    A rule-based accuracy reward (DeepSeek-R1, arXiv 2501.12948, §2.2). With ``#### (.+)`` the rule
    is GSM8K's final answer (Cobbe et al. 2021, arXiv 2110.14168).
    The answer is what follows the last ``</think>`` (the whole response if there is none) or, with
    ``pattern``, the first group of the last match of that regular expression in it. Both sides are
    compared without surrounding or repeated white space and without commas between thousands.

    Raises ``ValueError`` if the prompt has no answer or ``pattern`` has no group.
    """
    regex = None if pattern is None else re.compile(pattern)
    if regex is not None and regex.groups < 1:
        raise ValueError(f"pattern {pattern!r} needs one group, such as '#### (.+)'")
    check_prompt(prompt)
    assert prompt.answer is not None
    expected = _normalise(prompt.answer, ignore_case)
    answers = [_extract(after_thinking(text), regex) for text in texts]
    return [float(a is not None and _normalise(a, ignore_case) == expected) for a in answers]


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; all of ``text`` if there is none."""
    return text.rpartition("</think>")[2]


def _extract(text: str, regex: re.Pattern[str] | None) -> str | None:
    if regex is None:
        return text
    matches = list(regex.finditer(text))
    return matches[-1][1] if matches else None


def _normalise(answer: str, ignore_case: bool) -> str:
    answer = " ".join(answer.split())
    answer = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), answer)
    return answer.casefold() if ignore_case else answer
