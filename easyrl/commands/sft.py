"""``easyrl sft CONFIG [key=value …]``: supervised fine-tuning, in this process."""

from __future__ import annotations

import typer


def sft_command(context: typer.Context) -> None:
    """Fine-tune on given completions: easyrl train with source: records, and recipe sft by default.

    docs/supervised.md has the records' formats.
    """
    from easyrl.train import main

    defaults = {"recipe": {"name": "sft"}}
    about = sft_command.__doc__ or ""
    told = {"prog": "easyrl sft", "about": about}
    raise typer.Exit(main(context.args, defaults, fixed=["source=records"], **told))
