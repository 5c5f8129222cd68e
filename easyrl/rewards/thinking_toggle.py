"""The reward of a response that thinks, or does not, as the system prompt says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from easyrl.schema import Prompt

_MODE = re.compile(r"\bdetailed thinking (on|off)\b", re.IGNORECASE)
_THOUGHT = re.compile(r"\s*<think>(.*)</think>(.*)", re.DOTALL)


def thinking_toggle(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    field: str = "thinking",
    think_in_prompt: bool = False,
) -> list[float]:
    """1.0 where a response's tags are those of its prompt's mode, else 0.0 (Llama-Nemotron's format
    rewards, arXiv 2505.00949).

    *on*: ``<think>…</think>``, each tag once, the thought and what follows it not empty. *off*:
    neither tag. The mode is ``prompt.metadata[field]`` where that is there, else what the system
    message says, else the question: ``detailed thinking on`` or ``off``, the last one counts.

    ``think_in_prompt``: with *on* the chat template already wrote ``<think>``, and the response
    starts behind it.

    Raises ``ValueError`` if the prompt says neither.
    """
    if not texts:
        return []
    if not _is_on(prompt, field):
        return [float("<think>" not in text and "</think>" not in text) for text in texts]
    opening = "<think>" if think_in_prompt else ""
    return [float(_thinks(opening + text)) for text in texts]


def check_prompt(prompt: Prompt, *, field: str = "thinking", **_: Any) -> None:
    """Raises ``ValueError`` if the prompt does not say whether to think."""
    _is_on(prompt, field)


def _is_on(prompt: Prompt, field: str) -> bool:
    if field in prompt.metadata:
        mode = prompt.metadata[field]
        if mode not in ("on", "off"):
            raise ValueError(f"{field!r} of the prompt is {mode!r}; it must be 'on' or 'off'")
        return bool(mode == "on")
    for text in (prompt.system, prompt.text):
        if modes := _MODE.findall(text):
            return bool(modes[-1].lower() == "on")
    raise ValueError(
        f"the prompt says neither 'detailed thinking on' nor 'off', and has no {field!r}; write "
        f"data.system_prompt='detailed thinking {{{field}}}' with data.template_values.{field}, or "
        "give each record a system message"
    )


def _thinks(text: str) -> bool:
    match = _THOUGHT.fullmatch(text)
    once = text.count("<think>") == 1 and text.count("</think>") == 1
    return once and match is not None and bool(match[1].strip()) and bool(match[2].strip())
