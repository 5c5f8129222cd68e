"""``easyrl up CONFIG [key=value …]``: servers, trainer and console on one machine."""

from __future__ import annotations

import typer

from easyrl.arguments.shared import ConfigFile, Overrides, Resume


def up_command(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Start the servers of inference.launch and the trainer on this machine; Ctrl-C ends all."""
    from easyrl.one_machine.run import run_here

    raise typer.Exit(run_here(config, overrides or [], resume=resume))
