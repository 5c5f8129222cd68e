"""Whether the journalled groups are what the certificate says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.certificate.saved import needed_journal
from easyrl.ledger.journal import JournalError, JournalledGroup, read_batch
from easyrl.ledger.journal.reading import batch_folder, file_name
from easyrl.schema import Completion, GroupOutcome, Key, PolicyVersion, RolloutGroup

# attempt → what the recipe of that attempt decides
AcceptOf = Callable[[int], Callable[[RolloutGroup], str | None] | None]


class JournalEvidence:
    """Compares batches with the journal, which a live run may be pruning meanwhile.

    Args:
        accept_of: by attempt, what its recipe says of a group: a reason to reject it, or None; no
            function where that cannot be known.

    """

    def __init__(self, run_dir: Path, directory: Path, accept_of: AcceptOf) -> None:
        self._run_dir = run_dir
        self._directory = directory
        self._accept_of = accept_of
        self.num_replayed = 0  # decisions: groups whose outcome follows from the journal
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

    def _find(self, record: BatchRecord, trained_on: dict[Key, GroupOutcome]) -> None:
        """Every group of ``trained_on`` is there, as it was certified."""
        others: dict[Key, JournalledGroup] = {}  # of the same prompts, not trained
        try:
            for found in read_batch(self._directory, record.batch):
                group = trained_on.get(found.key)
                if group is not None and group.digest == found.digest:
                    _compare(record, group, found)
                    self._replay(record, group, found)
                    del trained_on[found.key]
                else:
                    others[found.key] = found
        except JournalError as error:
            raise CertificateError(str(error), batch=record.batch) from error
        for group in trained_on.values():
            raise _not_found(record, group, others.get(group.key))

    def _replay(self, record: BatchRecord, group: GroupOutcome, found: JournalledGroup) -> None:
        """The recipe decides again."""
        accept = self._accept_of(PolicyVersion.parse(record.version).attempt)
        if accept is None:
            return
        if (
            found.group.excluded is None
            and (said := _reason(accept(found.group))) != found.group.rejected
        ):
            told = ["accepted" if r is None else f"rejected ({r})" for r in (group.reason, said)]
            raise CertificateError(
                f"is {told[0]} in certificate and journal, its recipe says: {told[1]}",
                batch=record.batch,
                key=group.key,
                file=_file(record, found),
            )
        self.num_replayed += 1

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


def _reason(said: str | None) -> str | None:
    """As the producer keeps it."""
    return said if said is None else said or "no reason given"


def _compare(record: BatchRecord, group: GroupOutcome, found: JournalledGroup) -> None:
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
    said = GroupOutcome.of(found.group, recovered=group.recovered)
    differences = (
        ("weights", record.weights, found.weights),
        ("versions on its tokens", group.stamped, said.stamped),
        ("endpoints", group.endpoints, said.endpoints),
        ("position", group.position, said.position),
        ("accepted", group.accepted, said.accepted),
        ("reason", group.reason, said.reason),
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
    record: BatchRecord, group: GroupOutcome, other: JournalledGroup | None
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
