"""What else a run's folder tells of how far it has come: metrics, checkpoints and journals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import History
from easyrl.ledger.checkpoints.folder import MANIFEST, CheckpointFolder
from easyrl.ledger.journal.reading import (
    JournalFile,
    batch_folder,
    journal_files,
    journalled_batches,
    read_file,
)
from easyrl.ledger.journal.record_file import JournalError
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.run_files import METRICS_FILE

JOURNAL_FOLDER, CHECKPOINT_FOLDER = "journal", "checkpoints"
CONFIG_FILES = "config*.yaml"  # the newest attempt's, and each attempt's
REMOVED = "lines were removed from its end"


@dataclass(frozen=True)
class Traces:
    """How far a run had come by then; to be read *before* the certificate, as it may go on.

    A line is on the disk before anything tells of its batch: metrics, a checkpoint, or a journal of
    the batch after it.
    """

    last_step: int  # that was reported; 0 if none was
    checkpoints: list[tuple[str, int]]  # manifest, below the run's folder, and closed batches
    journals: list[tuple[int, JournalFile]]  # with its batch

    @classmethod
    def read(cls, run_dir: Path) -> Traces:
        """All that there is now."""
        metrics, journal = run_dir / METRICS_FILE, run_dir / JOURNAL_FOLDER
        steps = [int(line["step"]) for line in read_metrics(metrics)] if metrics.exists() else []
        saved = [(file, int(state["progress"]["closed_batches"]))
                 for file, state in _saved_states(run_dir)]  # fmt: skip
        return cls(max(steps, default=0), saved, _journals(journal))

    def examine(self, history: History) -> None:
        """Raises ``CertificateError`` naming a file that is ahead of the certificate."""
        if self.last_step > history.last_step:
            raise CertificateError(
                f"has step {self.last_step}, the certificate ends with step {history.last_step}: "
                f"{REMOVED}",
                file=METRICS_FILE,
            )
        for name, closed_batches in self.checkpoints:
            if closed_batches > history.num_certified:
                raise CertificateError(
                    f"was written after {closed_batches} batches, the certificate has "
                    f"{history.num_certified}: {REMOVED}",
                    file=name,
                )
        last_attempt = max(history.attempts, default=-1)
        for batch, file in self.journals:
            if file.attempt < last_attempt:
                # What it had lost of the certificate, the next attempt has trained again: that
                # began behind what was left, and nothing before its line can go without breaking
                # the chain.
                continue
            open_batch = history.open_batches.get(file.attempt, -1)
            if batch > open_batch and _has_records(batch, file):
                at_end = f"was at batch {open_batch} when it ends"
                known = at_end if open_batch >= 0 else "is not in it"
                raise CertificateError(
                    f"has records, but by the certificate attempt {file.attempt} {known}: "
                    f"{REMOVED}",
                    batch=batch,
                    file=file.name,
                )


def refuse_missing_journal(run_dir: Path, batch: int) -> None:
    """Raises ``CertificateError`` unless the run may have removed ``batch`` from its journal.

    Batches are removed from the oldest on, and only those before the oldest checkpoint, if any may
    be. Raises ``ValueError`` if the configuration cannot be read.
    """
    first, because = 0, "none is removed unless a checkpoint follows it, and there is none"
    older = [v for v in journalled_batches(run_dir / JOURNAL_FOLDER) if v < batch]
    if older:
        raise CertificateError(
            f"its journal is missing, though the journal goes back to batch {older[0]}"
        )
    if _keeps_all(run_dir):
        because = "with journal.keep=all none is ever removed"
    elif oldest := next(_saved_states(run_dir), None):
        first = int(oldest[1]["journal"]["batch"])
        because = f"{oldest[0]} goes on from batch {first}"
    if batch >= first:
        raise CertificateError(f"its journal is missing, and {because}")


def _saved_states(run_dir: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """By step, manifests and what they say; without damaged ones, as for a resumed run."""
    for folder, record in CheckpointFolder(run_dir / CHECKPOINT_FOLDER).readable():
        yield f"{CHECKPOINT_FOLDER}/{folder.name}/{MANIFEST}", record["state"]


class _JournalSettings(msgspec.Struct):
    keep: str = "resumable"


class _Settings(msgspec.Struct):
    journal: _JournalSettings = msgspec.field(default_factory=_JournalSettings)


def _keeps_all(run_dir: Path) -> bool:
    """In all of its attempts: what one has removed stays removed."""
    kept = []
    for file in run_dir.glob(CONFIG_FILES):
        try:
            settings = msgspec.yaml.decode(file.read_bytes(), type=_Settings)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{file}: is no configuration: {error}") from error
        kept.append(settings.journal.keep)
    return set(kept) == {"all"}


def _journals(directory: Path) -> list[tuple[int, JournalFile]]:
    found = []
    for batch in journalled_batches(directory):
        with suppress(JournalError):  # whoever reads this batch is told
            found += [(batch, file) for file in journal_files(batch_folder(directory, batch))]
    return found


def _has_records(batch: int, file: JournalFile) -> bool:
    """At least one that is whole."""
    try:
        _, records = read_file(file, batch)
        return next(records, None) is not None
    except JournalError as error:
        raise CertificateError(str(error), batch=batch) from error
