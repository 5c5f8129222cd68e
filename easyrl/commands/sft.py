"""``easyrl sft CONFIG [key=value …]``: supervised fine-tuning, in this process."""

from __future__ import annotations

import typer


def sft_command(context: typer.Context) -> None:
    """Fine-tune on given completions: easyrl train with source: records, and recipe sft by default.

    docs/supervised.md has the records' formats.
    """
    from easyrl.train import main

    raise typer.Exit(main([*context.args, "source=records"], {"recipe": {"name": "sft"}}))
