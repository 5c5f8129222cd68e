"""What a command prints: texts and tables, for people and for other programs."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

UNBROKEN = 10_000  # columns


def print_plain(shown: str | Table) -> None:
    """Prints to standard output; a line of a table is never broken where a program reads it."""
    width = None if sys.stdout.isatty() else UNBROKEN
    # what is shown are names: a bracket or a colon in them is no markup
    Console(width=width, markup=False, emoji=False).print(shown)
