"""A verifiers environment with a tool: products, by a calculator."""

from __future__ import annotations

import operator
import re
from typing import Any

import verifiers as vf
from datasets import Dataset

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(expression: str) -> str:
    """Works out a sum, difference or product of two integers.

    Args:
        expression: such as 12*13
    """
    found = re.fullmatch(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*", expression)
    if found is None:
        return "error: two integers and one of + - *, such as 12*13"
    return str(OPERATORS[found[2]](int(found[1]), int(found[3])))


def right(completion: Any, answer: str, **kwargs: Any) -> float:
    """1 if the last message is the answer alone."""
    last = completion[-1]
    is_mapping = isinstance(last, dict)
    role, text = (last["role"], last["content"]) if is_mapping else (last.role, last.content)
    return float(role == "assistant" and str(text).strip() == answer)


def load_environment(max_turns: int = 3) -> vf.Environment:
    rows = Dataset.from_list([{"question": "12*13", "answer": "156"}])
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=rows, tools=[calculate], rubric=rubric, max_turns=max_turns)
