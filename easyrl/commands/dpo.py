"""``easyrl dpo CONFIG [key=value …]``: training on preference pairs with DPO, in this process."""

from __future__ import annotations

import typer


def dpo_command(context: typer.Context) -> None:
    """Train on preference pairs: easyrl train with source: records, and recipe dpo by default.

    docs/supervised.md has the records' formats.
    """
    from easyrl.train import main

    defaults = {"recipe": {"name": "dpo"}}
    about = dpo_command.__doc__ or ""
    told = {"prog": "easyrl dpo", "about": about}
    raise typer.Exit(main(context.args, defaults, fixed=["source=records"], **told))
