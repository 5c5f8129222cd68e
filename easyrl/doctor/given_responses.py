"""Responses of which the reward is known beforehand: a record's answer, and another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.schema import Completion, Prompt

# How a model would write its answer: alone, boxed as in mathematics, behind its thoughts.
FORMS = ("{}", "\\boxed{{{}}}", "<think>\n\n</think>\n\n{}")

Encode = Callable[[str], Sequence[int]]  # text → token ids, nothing added


@dataclass(frozen=True)
class KnownAnswers:
    """Of one prompt: the same forms of its own answer and of a wrong one."""

    prompt: Prompt
    right: tuple[Completion, ...]
    wrong: tuple[Completion, ...]


def known_answers(
    prompts: Sequence[Prompt], encode: Encode, end_id: int | None, most: int
) -> list[KnownAnswers]:
    """Of the first ``most`` prompts with an answer, the wrong one the next other answer.

    Empty if no two answers differ. ``end_id`` ends each response.
    """

    def given(answer: str) -> tuple[Completion, ...]:
        ends = [] if end_id is None else [end_id]
        texts = [form.format(answer) for form in FORMS]
        return tuple(_completion([*encode(text), *ends]) for text in texts)

    answered = [prompt for prompt in prompts if prompt.answer is not None]
    found = []
    for prompt in answered[:most]:
        others = (p.answer for p in answered if p.answer != prompt.answer)
        if (other := next(others, None)) is not None:
            assert prompt.answer is not None
            found.append(KnownAnswers(prompt, given(prompt.answer), given(other)))
    return found


def _completion(token_ids: Sequence[int]) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(len(token_ids), np.float32),
        finish_reason="stop",
        version_spans=(),
        endpoint="",
        loss_mask=np.ones(len(token_ids), bool),
    )
