"""``easyrl sft CONFIG`` and ``easyrl dpo CONFIG``: training on records, in this process.

As ``easyrl train`` with ``source: records``, and the recipe where the file names none.
"""

from __future__ import annotations

import typer


def sft_command(context: typer.Context) -> None:
    """Fine-tune on given completions; docs/supervised.md has the records' formats."""
    _train(context, "sft")


def dpo_command(context: typer.Context) -> None:
    """Train on preference pairs with DPO; docs/supervised.md has the records' formats."""
    _train(context, "dpo")


def _train(context: typer.Context, recipe: str) -> None:
    from easyrl.train import main

    raise typer.Exit(main([*context.args, "source=records"], {"recipe": {"name": recipe}}))
