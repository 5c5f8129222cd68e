"""Text from outside the run, made fit for a log line, a journal record and a terminal."""

from __future__ import annotations


def printable(text: str, limit: int = 500) -> str:
    """``text`` in one line, without control characters, at most ``limit`` characters long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 4] + " ..."
