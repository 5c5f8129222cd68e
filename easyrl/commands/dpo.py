"""``easyrl dpo CONFIG [key=value …]``: training on preference pairs with DPO, in this process."""

from __future__ import annotations

import typer


def dpo_command(context: typer.Context) -> None:
    """Train on preference pairs: easyrl train with source: records, and recipe dpo by default.

    docs/supervised.md has the records' formats.
    """
    from easyrl.train import main

    raise typer.Exit(main([*context.args, "source=records"], {"recipe": {"name": "dpo"}}))
