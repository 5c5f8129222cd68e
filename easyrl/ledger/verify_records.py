"""``easyrl verify RUN_DIR`` of a run on records: whether each was trained, and once.

The records of each batch follow from seed and dataset size; with the data at hand, the tokens that
were trained are compared with those that the files give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from easyrl.ledger.certificate.errors import CertificateError, located
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import RecordsBatch
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.certificate_check import (
    CertificateVerdict,
    examine_certificate,
    number,
    order_of,
    refuse_other_prompts,
)
from easyrl.runtime.run_files import CERTIFICATE_FILE

# The digest of each record's tokens, by its index; None where the data cannot be read any more.
DigestsOf = Callable[[], Sequence[str] | None]


@dataclass
class RecordsVerdict(CertificateVerdict):
    """What was found of a run on records; these are what is trained or skipped."""

    num_records: int = 0  # of the data
    epochs: int = 0  # begun
    compared: bool = False  # whether the tokens were compared with the data

    @property
    def is_sound(self) -> bool:
        return self.violation is None

    def __str__(self) -> str:
        if self.violation is not None:
            return f"NOT each record once: {self.violation}"
        once = "each trained once"
        if self.epochs > 1:
            once = f"each trained once in each of {self.epochs} epochs"
        distinct = min(self.trained + self.skipped, self.num_records)
        partly = self.epochs > 1 and self.trained + self.skipped < self.epochs * self.num_records
        told = [
            (True, f"{number(distinct, 'record')}, {once}"),
            (partly, "the last of them not to its end"),
            (distinct < self.num_records, f"of {self.num_records} in the data"),
            (self.skipped, f"{self.skipped} of skipped steps"),
            (True, number(self.batches, "batch", "batches")),
            (self.attempts > 1, f"{self.attempts} attempts"),
            (self.attempts > 1, f"{number(self.superseded, 'line')} superseded"),
            (not self.compared, "tokens not compared (the data cannot be read)"),
            (self.torn, "a line cut off at the end"),
            (True, "complete" if self.ended else "not complete"),
        ]
        return ", ".join(fact for counts, fact in told if counts)


def is_run_on_records(run_dir: Path) -> bool:
    """By the first line of its certificate; False where that cannot be read.

    Raises ``OSError`` if there is none.
    """
    history = History(run_dir / CERTIFICATE_FILE)
    try:
        history.take_first()
    except CertificateError:  # whoever reads all lines is told
        return False
    return history.run is not None and history.run.source == "records"


def verify_records(
    run_dir: Path,
    digests_of: DigestsOf = lambda: None,
    *,
    key: SealKey | None = None,
    chain: str | None = None,
) -> RecordsVerdict:
    """Checks the whole run, which may be going on. ``key`` and ``chain`` as for ``verify``."""
    verdict = RecordsVerdict()
    try:
        _verify(run_dir, verdict, digests_of, key, chain)
    except CertificateError as error:
        verdict.violation = error
    return verdict


def _verify(
    run_dir: Path,
    verdict: RecordsVerdict,
    digests_of: DigestsOf,
    key: SealKey | None,
    chain: str | None,
) -> None:
    history = examine_certificate(run_dir, verdict, key, chain)
    assert history.run is not None
    verdict.num_records = history.run.num_prompts
    digests = digests_of()
    verdict.compared = digests is not None
    order = order_of(history.run)
    for v, batch in enumerate(history.batches):
        record = history.records(v)
        with located(line=batch.line.number, batch=v):
            refuse_other_prompts(order, batch.first_position, [g.key for g in record.groups])
            if digests is not None:
                _refuse_other_tokens(record, digests)
        outcomes = [group.outcome for group in record.groups]
        verdict.trained += outcomes.count("trained")
        verdict.skipped += outcomes.count("skipped")
        verdict.batches += 1
    verdict.epochs = -(-history.num_drawn // verdict.num_records)


def _refuse_other_tokens(batch: RecordsBatch, digests: Sequence[str]) -> None:
    """Raises ``CertificateError`` naming a record whose tokens are not those of the data."""
    for record in batch.groups:
        now = digests[record.index] if record.index < len(digests) else "no record"
        if record.digest != now:
            raise CertificateError(
                f"was trained with tokens {record.digest[:12]}, the data has {now[:12]}",
                key=record.key,
            )
