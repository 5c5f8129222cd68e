"""``easyrl verify RUN_DIR``: whether a run was on-policy, by its certificate and journal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from easyrl.arguments.shared import RunDir


def verify_command(
    run_dir: RunDir,
    seal: Annotated[
        Path | None, typer.Option(help="key file of a sealed run", metavar="KEYFILE")
    ] = None,
    chain: Annotated[
        str | None,
        typer.Option(help="hash that the run printed last, or gave its trackers", metavar="HASH"),
    ] = None,
) -> None:
    """Check a run's certificate and journal; exits with 1, naming it, at the first violation.

    Of a run on records: that each was trained, and once.
    """
    from easyrl.build.verify import verify_run
    from easyrl.ledger.certificate.seal import read_seal_key

    try:
        key = None if seal is None else read_seal_key(seal, run_dir)
        sound, told, certificate = verify_run(run_dir, key, chain)
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(told)
    if sound:
        print(certificate)
    raise typer.Exit(0 if sound else 1)
