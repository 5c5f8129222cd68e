"""``easyrl train CONFIG [key=value …]``: the trainer in this process (``easyrl/train.py``)."""

from __future__ import annotations

import typer


def train_command(context: typer.Context) -> None:
    """Train in this process; on several devices use deepspeed --module easyrl.train CONFIG."""
    from easyrl.train import main

    raise typer.Exit(main(context.args))
