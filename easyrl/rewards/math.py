"""The reward of an answer that is mathematically equal to the dataset's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from math_verify import parse, verify

from easyrl.rewards.exact import after_thinking, check_prompt
from easyrl.schema import Prompt

# Its warning that its time limits are off would be printed by every worker.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def math(prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]) -> list[float]:
    """1.0 where math-verify finds a response's answer equal to ``prompt.answer``, else 0.0.

    A rule-based accuracy reward (DeepSeek-R1, arXiv 2501.12948, §2.2), whose rule is Hugging Face's
    math-verify (github.com/huggingface/Math-Verify).
    A ``\\boxed{}`` answer counts before any other expression. Only what follows the last
    ``</think>`` is read, the whole response if there is none.

    Has no time limit of its own: math-verify's needs SIGALRM in a main thread, and elsewhere scores
    zero in silence. The worker process that runs this is killed instead, after ``timeout_s``.
    Raises ``ValueError`` if the prompt has no answer, or one without anything to compare.
    """
    check_prompt(prompt)
    assert prompt.answer is not None
    if not texts:
        return []
    # as LaTeX; plain where it brings its own delimiters
    delimited = (
        "\\boxed" in prompt.answer or prompt.answer.count("$") - prompt.answer.count("\\$") >= 2
    )
    expected = _parse(prompt.answer if delimited else f"${prompt.answer}$")
    if not expected:
        raise ValueError(f"prompt {prompt.index}: math-verify finds nothing in {prompt.answer!r}")
    answers = [_parse(after_thinking(text)) for text in texts]
    return [float(verify(expected, answer, timeout_seconds=None)) for answer in answers]


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)  # type: ignore[arg-type]
