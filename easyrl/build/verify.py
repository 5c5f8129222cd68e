"""A run's certificate and journal checked with its own recipe and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from easyrl.build.recipe import accept_function
from easyrl.build.recipe_digest import recipe_digest
from easyrl.build.record_data import record_digests
from easyrl.build.weight_answers import RecomputedAnswers
from easyrl.config import ConfigError
from easyrl.config.file import load_config
from easyrl.ledger.certificate.records import AttemptRecord
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.verify import verify
from easyrl.ledger.verify_records import is_run_on_records, verify_records
from easyrl.runtime.run_files import CERTIFICATE_FILE, attempt_config_file
from easyrl.schema import RolloutGroup


class Verified(NamedTuple):
    """What was found of a run."""

    is_sound: bool  # on-policy; of a run on records: each was trained, and once
    told: str  # in words, the first violation
    certificate: str  # its hash, file, and whether it is sealed


def verify_run(run_dir: Path, key: SealKey | None = None, chain: str | None = None) -> Verified:
    """Of a run on rollouts or on records.

    ``key``: of a sealed run; ``chain``: the hash that the certificate has to end with. Raises
    ``ValueError`` and ``OSError`` for what cannot be read.
    """
    file = run_dir / CERTIFICATE_FILE
    if file.is_file() and is_run_on_records(run_dir):
        of_records = verify_records(run_dir, partial(record_digests, run_dir), key=key, chain=chain)
        told = f"certificate {of_records.chain} {file} ({of_records.seal_told})"
        return Verified(of_records.is_sound, str(of_records), told)
    verdict = verify(
        run_dir,
        cache(partial(_accept_of, run_dir)),
        answers_of=RecomputedAnswers(run_dir),
        key=key,
        chain=chain,
    )
    told = f"{verdict}\n{verdict.proofs_told}" if verdict.on_policy else str(verdict)
    certificate = f"certificate {verdict.chain} {file} ({verdict.seal_told})"
    return Verified(verdict.on_policy, told, certificate)


def _accept_of(
    run_dir: Path, attempt: AttemptRecord
) -> Callable[[RolloutGroup], str | None] | None:
    """What the recipe of ``attempt`` decides of a group; None if it is not there any more.

    Raises ``ValueError`` if it is another one by now.
    """
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
