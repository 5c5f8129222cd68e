"""A command line read by typer outside of ``easyrl``, as ``deepspeed --module`` starts a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import typer

Arguments = TypeVar("Arguments")


def parsed(
    declared: Callable[..., Arguments], argv: Sequence[str] | None, prog: str, about: str | None
) -> Arguments:
    """What ``declared`` makes of ``argv`` (default: the process's).

    ``prog`` and ``about`` are shown by ``--help``, which raises ``SystemExit`` with status 0; a
    mistake does with status 2.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    taken: list[Arguments] = []

    @app.command(help=about)
    @wraps(declared)
    def take(**arguments: Any) -> None:
        taken.append(declared(**arguments))

    try:
        app(argv, prog_name=prog)
    except SystemExit:
        if not taken:
            raise
    return taken[0]
