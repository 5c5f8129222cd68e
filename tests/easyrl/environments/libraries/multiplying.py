"""A verifiers environment with a tool: products."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> str:
    """Multiplies two integers.

    Args:
        a: the first
        b: the second
    """
    return str(a * b)


def right(completion: Any, answer: str, **kwargs: Any) -> float:
    last = completion[-1]
    text = last["content"] if isinstance(last, dict) else last.content
    return float(answer in str(text))


def load_environment() -> vf.Environment:
    rows = Dataset.from_list([{"question": "What is 12 * 13?", "answer": "156"}])
    return vf.ToolEnv(
        dataset=rows,
        tools=[multiply],
        rubric=vf.Rubric(funcs=[right]),
        system_prompt="Use the tool.",
        max_turns=4,
    )
