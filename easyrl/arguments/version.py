"""``easyrl --version``: of EasyRL, of Python, of torch."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

import easyrl


def _show(asked: bool) -> None:
    if asked:
        try:
            torch = version("torch")  # without its import
        except PackageNotFoundError:
            torch = "not installed"
        print(f"easyrl {easyrl.__version__}, Python {platform.python_version()}, torch {torch}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show, help="show versions and stop"),
    ] = False,
) -> None:
    """Strictly on-policy, periodically asynchronous RL training for language models."""
