"""``easyrl verify RUN_DIR``: whether a run was on-policy, by its certificate and journal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easyrl.arguments.shared import RunDir
from easyrl.runtime.run_files import CERTIFICATE_FILE

if TYPE_CHECKING:
    from easyrl.ledger.certificate.records import AttemptRecord
    from easyrl.ledger.certificate.seal import SealKey
    from easyrl.schema import RolloutGroup


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
    from easyrl.ledger.certificate.seal import read_seal_key
    from easyrl.ledger.verify_records import is_run_on_records

    try:
        key = None if seal is None else read_seal_key(seal, run_dir)
        on_records = (run_dir / CERTIFICATE_FILE).is_file() and is_run_on_records(run_dir)
        check = _verify_records if on_records else _verify_rollouts
        sound, told, certificate = check(run_dir, key, chain)
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(told)
    if sound:
        print(certificate)
    raise typer.Exit(0 if sound else 1)


def _verify_rollouts(
    run_dir: Path, key: SealKey | None, chain: str | None
) -> tuple[bool, str, str]:
    """Whether the run was on-policy, what to say of it, and of its certificate."""
    from easyrl.build.weight_answers import RecomputedAnswers
    from easyrl.ledger.verify import verify

    verdict = verify(
        run_dir,
        cache(partial(_accept_of, run_dir)),
        answers_of=RecomputedAnswers(run_dir),
        key=key,
        chain=chain,
    )
    told = f"{verdict}\n{verdict.proofs_told}" if verdict.on_policy else str(verdict)
    file = run_dir / CERTIFICATE_FILE
    return verdict.on_policy, told, f"certificate {verdict.chain} {file} ({verdict.seal_told})"


def _verify_records(run_dir: Path, key: SealKey | None, chain: str | None) -> tuple[bool, str, str]:
    """Whether each record was trained once, what to say of it, and of its certificate."""
    from easyrl.build.records import record_digests
    from easyrl.ledger.verify_records import verify_records

    verdict = verify_records(run_dir, partial(record_digests, run_dir), key=key, chain=chain)
    file = run_dir / CERTIFICATE_FILE
    told = f"certificate {verdict.chain} {file} ({verdict.seal_told})"
    return verdict.is_sound, str(verdict), told


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
