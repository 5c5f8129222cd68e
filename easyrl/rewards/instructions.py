"""The reward of a response that follows its prompt's verifiable instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from easyrl.rewards.exact import after_thinking
from easyrl.rewards.instruction_checks import CHECKS, follows
from easyrl.rewards.keywords import keyword_problem
from easyrl.schema import Prompt

IDS, ARGUMENTS = "instruction_id_list", "kwargs"  # fields of a record, as IFEval's data has them


def instructions(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    score: Literal["all", "fraction"] = "all",
) -> list[float]:
    """Whether a response follows all of its prompt's instructions, or the share that it follows.

    The strict scores of IFEval (arXiv 2311.07911): ``all`` is its accuracy per prompt, ``fraction``
    that per instruction, of one prompt. What the record's ``instruction_id_list`` and ``kwargs``
    ask for, its fields as in IFEval's data, is checked by ``instruction_checks.py`` on what follows
    the last ``</think>``, the whole response if there is none.

    Raises ``ValueError`` if the prompt has no instructions, or one that cannot be checked.
    """
    if not texts:
        return []
    asked = _asked(prompt)
    shares = []
    for text in texts:
        answer = after_thinking(text)
        shares.append(sum(follows(name, answer, given) for name, given in asked) / len(asked))
    return [float(share == 1.0) for share in shares] if score == "all" else shares


def check_prompt(prompt: Prompt, **_: Any) -> None:
    """Raises ``ValueError`` if the prompt has no instructions, or one that cannot be checked."""
    for number, (name, given) in enumerate(_asked(prompt)):
        if (problem := keyword_problem(CHECKS[name], given)) is not None:
            raise ValueError(f"{ARGUMENTS}[{number}], of {name}: {problem}")


def _asked(prompt: Prompt) -> list[tuple[str, dict[str, Any]]]:
    """Id and arguments of each instruction."""
    names, given = prompt.metadata.get(IDS), prompt.metadata.get(ARGUMENTS)
    if not isinstance(names, list) or not names:
        raise ValueError(f"{IDS!r} of the prompt is {names!r:.100}; it must be a list of ids")
    if not isinstance(given, list) or len(given) != len(names):
        raise ValueError(
            f"{ARGUMENTS!r} of the prompt is {given!r:.100}; it must be a list with the arguments "
            f"of each of the {len(names)} instructions"
        )
    if unknown := [name for name in names if name not in CHECKS]:
        reason = " (no language detector is used)" if str(unknown[0]).startswith("language") else ""
        raise ValueError(
            f"{unknown[0]!r} in {IDS!r} cannot be checked{reason}; leave the record out, or use "
            f"one of {', '.join(CHECKS)}"
        )
    return [(name, _arguments(each)) for name, each in zip(names, given, strict=True)]


def _arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Without those of other instructions, which a table has as nulls; counts as integers."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{ARGUMENTS!r} of the prompt has {given!r:.100}; it must be a mapping")
    found = {key: value for key, value in (given or {}).items() if value is not None}
    is_count = {key: isinstance(v, float) and v.is_integer() for key, v in found.items()}
    return {key: int(value) if is_count[key] else value for key, value in found.items()}
