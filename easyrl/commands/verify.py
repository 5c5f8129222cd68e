"""``easyrl verify RUN_DIR``: whether a run was on-policy, by its certificate and journal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def verify_command(
    run_dir: Annotated[Path, typer.Argument(help="the run's run.output_dir", metavar="RUN_DIR")],
) -> None:
    """Check a run's certificate and journal; exits with 1, naming it, at the first violation."""
    from easyrl.ledger.verify import verify

    try:
        verdict = verify(run_dir)
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(verdict)
    raise typer.Exit(0 if verdict.on_policy else 1)
