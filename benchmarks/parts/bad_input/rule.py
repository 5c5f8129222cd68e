"""The rule by which ``benchmarks.bad_input`` calls an error message clear.

It looks at the exit status and the printed text only, and is the same for all kinds. A *message* is
what begins with the last ``easyrl`` prefix, or with the usage line above it, among the last six
lines that are not empty (without a prefix, those six lines). It is clear if

1. the exit status is the documented one (README.md, Exit statuses), which is not 0;
2. nothing printed has a Python traceback;
3. it contains the mistake's location: a key of the configuration, ``file:line``, a path, a URL or
   an option of the command line, whole, not as a part of a longer word;
4. it contains a remedy: a clause that begins with one of ``IMPERATIVES``, or one of
   ``ALTERNATIVES``, which say what would be right. What only says that something is wrong
   ("invalid", "cannot", "is required", "does not exist") is none;
5. it has at most 500 characters, the name of the temporary folder not counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MOST_LINES, MOST_CHARACTERS = 6, 500
IMPERATIVES = """
    add change check choose close convert correct define delete derive download drop end export
    fetch fill fix give indent install leave list load lower make move name pip put quote raise
    regenerate remove rename repair replace restart return set start take tell turn unset upgrade
    use wait wrap write
""".split()
ALTERNATIVES = (
    r"did you mean",
    r"^usage: ",  # the command line that would be right
    r"expected",
    r"must (?:be|have|contain|begin|end|not)\b",
    r"should (?:be|have|match)\b",
    r"has to (?:be|have)\b",
    r"needs (?:a|an|at least|one|the)\b",
    r"supported (?:are|is)",
    r"known (?:keys|are)",
    r"there (?:are|is): ",
    r"is now \w",  # the new name of a key
    r"[\w.]+=\S+ (?:leaves|goes on|tries)",  # a setting, and what it does
)
# A clause begins behind a sign or a conjunction; a clause of condition may stand before the verb.
_BEGIN = r"(?:^|[;:,.]\s+|\(|\b(?:or|and|please|to go on)\s+)(?:then )?"
_REMEDY = re.compile(
    rf"{_BEGIN}(?:{'|'.join(IMPERATIVES)})\b(?! of\b)|{'|'.join(ALTERNATIVES)}", re.M | re.I
)
_PREFIX, _USAGE = re.compile(r"easyrl[\w ]*:"), re.compile("usage:", re.I)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    status: int
    text: str  # all that it printed
    seconds: float


def traceback_in(text: str) -> bool:
    return "Traceback (most recent call last)" in text


def message_of(text: str) -> str:
    """The message that ``text`` ends with."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-MOST_LINES:]
    usage = [number for number, line in enumerate(lines) if _USAGE.match(line)]
    starts = usage or [number for number, line in enumerate(lines) if _PREFIX.match(line)]
    return "\n".join(lines[starts[-1] :] if starts else lines)


def unclear(outcome: Outcome, locations: Sequence[str], status: int, folder: str) -> list[str]:
    """What of the rule a message breaks; nothing if it is clear.

    Args:
        locations: where the mistake is; the message has to name each.
        status: the documented one.
        folder: the temporary folder, whose name does not count as length.
    """
    assert status != 0 and locations
    problems = []
    message = message_of(outcome.text)
    if outcome.status != status:
        problems.append(f"exit status {outcome.status}, documented is {status}")
    if traceback_in(outcome.text):
        problems.append("a traceback")
    for location in locations:
        if not re.search(rf"(?<![\w/.]){re.escape(location)}(?!\w)", message):
            problems.append(f"does not name {location.replace(folder, '…')}")
    if not _REMEDY.search(message):
        problems.append("no remedy")
    if (length := len(message.replace(folder, "…"))) > MOST_CHARACTERS:
        problems.append(f"{length} characters")
    return problems
