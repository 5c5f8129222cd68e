"""Whether the journalled groups are what the certificate says of them."""

from __future__ import annotations

from pathlib import Path

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import BatchRecord, CertifiedGroup
from easyrl.ledger.certificate.saved import needed_journal
from easyrl.ledger.journal import JournalError, JournalledGroup, read_batch
from easyrl.ledger.journal.reading import batch_folder, file_name
from easyrl.schema import Completion, Key


class JournalEvidence:
    """Compares batches with the journal, which a live run may be pruning meanwhile."""

    def __init__(self, run_dir: Path, directory: Path) -> None:
        self._run_dir = run_dir
        self._directory = directory
        self.num_pruned = 0  # batches that it does not go back to, as it may
        self.num_unjournalled = 0  # groups that were never in it

    def examine(self, record: BatchRecord) -> None:
        """Raises ``CertificateError`` naming prompt and file where the two differ."""
        trained_on = {group.key: group for group in record.groups if group.digest is not None}
        self.num_unjournalled += len(record.groups) - len(trained_on)
        if not trained_on:
            return
        try:
            self._find(record, trained_on)
        except CertificateError:
            if batch_folder(self._directory, record.batch).is_dir():
                raise
            self._refuse_missing(record)  # it may have gone while it was read
            self.num_pruned += 1

    def _find(self, record: BatchRecord, trained_on: dict[Key, CertifiedGroup]) -> None:
        """Every group of ``trained_on`` is there, as it was certified."""
        others: dict[Key, JournalledGroup] = {}  # of the same prompts, not trained
        try:
            for found in read_batch(self._directory, record.batch):
                group = trained_on.get(found.key)
                if group is not None and group.digest == found.digest:
                    _compare(record, group, found)
                    del trained_on[found.key]
                else:
                    others[found.key] = found
        except JournalError as error:
            raise CertificateError(str(error), batch=record.batch) from error
        for group in trained_on.values():
            raise _not_found(record, group, others.get(group.key))

    def _refuse_missing(self, record: BatchRecord) -> None:
        """Batches are removed from the oldest on, and only those that no checkpoint needs."""
        older = [v for v in journalled_batches(self._directory) if v < record.batch]
        if older:
            raise CertificateError(
                f"its journal is missing, though the journal goes back to batch {older[0]}",
                batch=record.batch,
            )
        needed = needed_journal(self._run_dir)
        if record.batch >= needed.first:
            raise CertificateError(
                f"its journal is missing, and {needed.because}", batch=record.batch
            )


def journalled_batches(directory: Path) -> list[int]:
    """Batches with a folder in the journal ``directory``, ascending."""
    names = [folder.name.removeprefix("batch-") for folder in directory.glob("batch-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def _compare(record: BatchRecord, group: CertifiedGroup, found: JournalledGroup) -> None:
    """The record of a group that was trained, against the group's entry and the batch."""
    file = _file(record, found)
    for number, completion in enumerate(found.group.completions):
        if problem := _span_problem(completion, record.accepted_versions):
            raise CertificateError(
                f"response {number}: {problem}",
                batch=record.batch,
                key=group.key,
                endpoint=completion.endpoint,
                file=file,
            )
    said = CertifiedGroup.of(found.group, group.outcome, recovered=group.recovered)
    is_excluded = found.group.excluded is not None
    differences = (
        ("weights", record.weights, found.weights),
        ("versions on its tokens", group.stamped, said.stamped),
        ("endpoints", group.endpoints, said.endpoints),
        ("excluded", group.outcome == "excluded", is_excluded),
        ("recovered", group.recovered, found.version != record.version),
    )
    for what, certified, journalled in differences:
        if certified != journalled:
            raise CertificateError(
                f"{what}: {certified} in the certificate, {journalled} in the journal",
                batch=record.batch,
                key=group.key,
                file=file,
            )


def _span_problem(completion: Completion, accepted: list[str]) -> str | None:
    """Every token has one version, and one that was trained."""
    end = 0
    for span in completion.version_spans:
        if span.version not in accepted:
            return f"tokens {span.start} to {span.end} are of version {span.version}"
        if span.start != end:
            return f"token {min(span.start, end)} has no version or two"
        end = span.end
    if end != len(completion.token_ids):
        return f"{len(completion.token_ids)} tokens, the versions cover {end}"
    return None


def _not_found(
    record: BatchRecord, group: CertifiedGroup, other: JournalledGroup | None
) -> CertificateError:
    digest = str(group.digest)[:12]
    if other is None:
        return CertificateError(
            f"was trained, and its record {digest} is not in the journal",
            batch=record.batch,
            key=group.key,
            file=batch_folder(Path("journal"), record.batch).as_posix(),
        )
    return CertificateError(
        f"its record is {other.digest[:12]}, trained was {digest}: the journal was changed",
        batch=record.batch,
        key=group.key,
        file=_file(record, other),
    )


def _file(record: BatchRecord, found: JournalledGroup) -> str:
    """Below the run's folder."""
    folder = batch_folder(Path("journal"), record.batch)
    return (folder / file_name(found.attempt, found.rank)).as_posix()
