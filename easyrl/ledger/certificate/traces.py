"""Checks for removed certificate lines: metrics, checkpoints and journals that are ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.evidence import journalled_batches
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.saved import SavedCheckpoint, saved_checkpoints
from easyrl.ledger.journal import JournalError
from easyrl.ledger.journal.reading import JournalFile, batch_folder, journal_files, read_file

REMOVED = "lines were removed from its end"


@dataclass(frozen=True)
class Traces:
    """How far a run had come by then; to be read *before* the certificate, as it may go on.

    A line is on the disk before anything tells of its batch: metrics, a checkpoint, or a journal of
    the batch after it.
    """

    checkpoints: Sequence[SavedCheckpoint]
    journals: Sequence[tuple[int, JournalFile]]  # with its batch

    @classmethod
    def read(cls, run_dir: Path, journal: Path) -> Traces:
        """All that there is now."""
        return cls(saved_checkpoints(run_dir), _journals(journal))

    def examine(self, history: History) -> None:
        """Raises ``CertificateError`` naming a file that is ahead of the certificate."""
        for saved in self.checkpoints:
            if saved.closed_batches > history.num_certified:
                raise CertificateError(
                    f"was written after {saved.closed_batches} batches, the certificate has "
                    f"{history.num_certified}: {REMOVED}",
                    file=saved.file,
                )
        for batch, file in self.journals:
            open_batch = history.open_batches.get(file.attempt, -1)
            if batch > open_batch and _has_records(batch, file):
                raise _ahead(batch, file, open_batch)


def _journals(directory: Path) -> list[tuple[int, JournalFile]]:
    found = []
    for batch in journalled_batches(directory):
        try:
            found += [(batch, file) for file in journal_files(batch_folder(directory, batch))]
        except JournalError:  # whoever reads this batch is told
            continue
    return found


def _has_records(batch: int, file: JournalFile) -> bool:
    """At least one that is whole."""
    try:
        _, records = read_file(file, batch)
        return next(records, None) is not None
    except JournalError as error:
        raise CertificateError(str(error), batch=batch) from error


def _ahead(batch: int, file: JournalFile, open_batch: int) -> CertificateError:
    known = "is not in it" if open_batch < 0 else f"was at batch {open_batch} when it ends"
    return CertificateError(
        f"has records, but by the certificate attempt {file.attempt} {known}: {REMOVED}",
        batch=batch,
        file=f"journal/{file.path.parent.name}/{file.path.name}",
    )
