"""``easyrl verify RUN_DIR``: whether a run was on-policy, by its certificate and journal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easyrl.runtime.run_files import CERTIFICATE_FILE

if TYPE_CHECKING:
    from easyrl.ledger.certificate.records import AttemptRecord
    from easyrl.schema import RolloutGroup


def verify_command(
    run_dir: Annotated[Path, typer.Argument(help="the run's run.output_dir", metavar="RUN_DIR")],
    seal: Annotated[
        Path | None, typer.Option(help="key file of a sealed run", metavar="KEYFILE")
    ] = None,
    chain: Annotated[
        str | None,
        typer.Option(help="hash that the run printed last, or gave its trackers", metavar="HASH"),
    ] = None,
) -> None:
    """Check a run's certificate and journal; exits with 1, naming it, at the first violation."""
    from easyrl.build.weight_answers import RecomputedAnswers
    from easyrl.ledger.certificate.seal import read_seal_key
    from easyrl.ledger.verify import verify

    try:
        key = None if seal is None else read_seal_key(seal, run_dir)
        verdict = verify(
            run_dir,
            cache(partial(_accept_of, run_dir)),
            answers_of=RecomputedAnswers(run_dir),
            key=key,
            chain=chain,
        )
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(verdict)
    if verdict.on_policy:
        print(verdict.proofs_told)
        print(f"certificate {verdict.chain} {run_dir / CERTIFICATE_FILE} ({verdict.seal_told})")
    raise typer.Exit(0 if verdict.on_policy else 1)


def _accept_of(
    run_dir: Path, attempt: AttemptRecord
) -> Callable[[RolloutGroup], str | None] | None:
    """What the recipe of ``attempt`` decides of a group; None if it is not there any more.

    Raises ``ValueError`` if it is another one by now.
    """
    from easyrl.build.ledger import recipe_digest
    from easyrl.build.recipe import accept_function
    from easyrl.config import ConfigError
    from easyrl.config.file import load_config
    from easyrl.runtime.run_files import attempt_config_file

    file = run_dir / attempt_config_file(attempt.attempt)
    if not file.is_file():
        return None
    try:
        config = load_config(file, to_look_back=True)
        own = config.recipe.file
        if attempt.recipe is not None and (own is None or own.is_file()):
            if (now := recipe_digest(config)) != attempt.recipe:
                raise ValueError(
                    f"{own or file}: the recipe of attempt {attempt.attempt} was {attempt.recipe} "
                    f"when it began and is {now} now: what it decided cannot be replayed with the "
                    "changed recipe; put it back as it was"
                )
        return accept_function(config)
    except ConfigError as error:
        print(f"easyrl: attempt {attempt.attempt}: its recipe's decisions are not checked: {error}")
        return None
