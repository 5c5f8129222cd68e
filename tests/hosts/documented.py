"""Commands as the documentation has them, so that what is run is what a user reads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def documented(page: str, beginning: str) -> list[str]:
    """The words of the one command in ``page``'s code blocks that begins so."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith(beginning)]
    assert len(found) == 1, f"{page}: {len(found)} commands begin with {beginning!r}"
    return shlex.split(found[0], comments=True)


def replaced(command: list[str], others: Mapping[str, str]) -> list[str]:
    """``command`` with other words: each key is one of its words, or the key of a setting."""
    result = list(command)
    for key, value in others.items():
        places = [i for i, word in enumerate(result) if word == key or word.startswith(f"{key}=")]
        assert len(places) == 1, f"{key!r} stands {len(places)} times in {command}"
        (place,) = places
        result[place] = value if result[place] == key else f"{key}={value}"
    return result
