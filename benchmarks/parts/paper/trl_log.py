"""Throughput of a run of TRL's trainers, from the dictionaries that it prints on the console.

``num_tokens`` counts the tokens of all sequences with their prompts since the start; the last
dictionary has ``train_runtime``, seconds of the whole training.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

DICTIONARY = re.compile(r"\{'.*?\}")
TOKENS, SECONDS = "num_tokens", "train_runtime"


def tokens_per_s_per_device(path: Path, devices: int | None) -> float:
    """Raises ``ValueError`` naming the file and what it lacks."""
    if devices is None:
        raise ValueError(
            f"{path}: TRL's log does not say on how many devices; give them, those of a vLLM "
            "server too, with --baseline-devices"
        )
    last: dict[str, float] = {}
    for line in path.read_text(errors="replace").splitlines():
        for text in DICTIONARY.findall(line):
            logged = _dictionary(text)
            last |= {key: float(logged[key]) for key in (TOKENS, SECONDS) if key in logged}
    for key, remedy in (
        (TOKENS, "give the console log of a TRL run"),
        (SECONDS, "it stands in the last one, let the run end"),
    ):
        if last.get(key, 0.0) <= 0:
            raise ValueError(f"{path}: has no dictionary with a positive {key!r}; {remedy}")
    return last[TOKENS] / last[SECONDS] / devices


def _dictionary(text: str) -> dict[str, Any]:
    """Empty if it is none. Values are numbers, or, with newer transformers, texts of them."""
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
