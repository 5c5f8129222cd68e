"""A batch's journal read back: all attempts, all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from easyrl.ledger.journal.codec import (
    AnyRecord,
    CodecError,
    DrainRecord,
    GroupRecord,
    Header,
    decode,
    decode_any,
    to_group,
)
from easyrl.ledger.journal.record_file import JournalError, RecordLocation, read_records
from easyrl.schema import PolicyVersion, RolloutGroup

_FILE = re.compile(r"attempt(\d+)-rank(\d+)\.journal")


class JournalFile(NamedTuple):
    """What one attempt of one rank wrote of a batch."""

    attempt: int
    rank: int
    path: Path

    @property
    def name(self) -> str:
        """Below the run's folder."""
        return "/".join(self.path.parts[-3:])


def read_batch(directory: Path, v: int) -> Iterator[RolloutGroup]:
    """Every group of batch ``v`` in the journal ``directory``, by attempt, rank and arrival.

    One at a time, for a batch may be large; their prompts have neither text, answer nor metadata. A
    prompt may come several times: of several attempts. Raises ``JournalError`` naming file and byte
    where something is not as it was written.
    """
    for file in journal_files(batch_folder(directory, v)):
        for place, record in read_file(file, v)[1]:
            if isinstance(record, GroupRecord):
                try:
                    yield to_group(record, record.prompt(), place.digest.hex())
                except CodecError as error:
                    raise JournalError(f"{file.path}: byte {place.offset}: {error}") from error


def read_drains(directory: Path, v: int, attempt: int) -> Iterator[list[DrainRecord]]:
    """What was taken together of batch ``v`` in ``attempt``: for each rank, in order.

    Raises ``JournalError`` like ``read_batch``.
    """
    for file in journal_files(batch_folder(directory, v)):
        if file.attempt == attempt:
            _, records = read_file(file, v)
            yield last_drains(record for _, record in records if isinstance(record, DrainRecord))


def last_drains(drains: Iterable[DrainRecord]) -> list[DrainRecord]:
    """Of one rank in one attempt: those since the batch began again for the last time."""
    drains = list(drains)
    last = max((drain.restart for drain in drains), default=0)
    return [drain for drain in drains if drain.restart == last]


def batch_folder(directory: Path, v: int) -> Path:
    """Where the groups of batch ``v`` are."""
    return directory / f"batch-{v:06d}"


def journalled_batches(directory: Path) -> list[int]:
    """Batches with a folder in the journal ``directory``, ascending."""
    names = [folder.name.removeprefix("batch-") for folder in directory.glob("batch-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def file_name(attempt: int, rank: int) -> str:
    return f"attempt{attempt}-rank{rank}.journal"


def journal_files(folder: Path) -> list[JournalFile]:
    """The files of a batch, by attempt and rank; none if the folder is not there."""
    found = []
    for path in folder.glob("*.journal"):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise JournalError(f"{path}: no rank writes a file of this name; remove it")
        found.append(JournalFile(int(match[1]), int(match[2]), path))
    return sorted(found)


def read_file(
    file: JournalFile, v: int
) -> tuple[Header | None, Iterator[tuple[RecordLocation, AnyRecord]]]:
    """What a file is bound to and its records; no header if its attempt ended before it.

    Raises ``JournalError`` if the file is not one of this attempt and of batch ``v``.
    """
    records = read_records(file.path)
    first = next(records, None)
    if first is None:
        return None, iter(())
    try:
        header = decode(Header, first[1], "a journal's header")
        version = PolicyVersion.parse(header.version)
    except ValueError as error:
        raise JournalError(f"{file.path}: byte {first[0].offset}: {error}") from error
    if (version.attempt, version.v) != (file.attempt, v):
        raise JournalError(
            f"{file.path}: is of version {header.version}; it was moved or renamed, put it back"
        )
    return header, _decoded(file, header, records)


def _decoded(
    file: JournalFile, header: Header, records: Iterator[tuple[RecordLocation, bytes]]
) -> Iterator[tuple[RecordLocation, AnyRecord]]:
    for place, payload in records:
        try:
            record = decode_any(payload)
        except CodecError as error:
            raise JournalError(f"{file.path}: byte {place.offset}: {error}") from error
        if isinstance(record, GroupRecord) and (
            (record.version, record.weights) != (header.version, header.weights)
        ):
            raise JournalError(
                f"{file.path}: byte {place.offset}: this group is of version {record.version} and "
                f"of weights {record.weights[:12]}, its file of {header.version} and "
                f"{header.weights[:12]}; it was changed after it was written"
            )
        yield place, record
