"""What earlier lives left of a batch, and which of it was made as it would be made now."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from easyrl.ledger.journal.codec import TakenRecord, token_digest
from easyrl.ledger.journal.reading import journal_files, read_file
from easyrl.ledger.journal.record_file import JournalError, RecordPlace
from easyrl.schema import Key, PolicyVersion, ServedWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finished:
    """An earlier life's group: what is known of it without reading it again."""

    place: RecordPlace
    num_tokens: int  # packed: P + ΣR
    prompt_digest: bytes  # ``codec.token_digest``


@dataclass
class EarlierLives:
    """What earlier lives left of a batch."""

    finished: dict[Key, Finished] = field(default_factory=dict)  # by these weights
    versions: set[str] = field(default_factory=set)  # of lives that made theirs
    made_otherwise: set[Key] = field(default_factory=set)  # other weights or settings
    takes: list[list[TakenRecord]] = field(default_factory=list)  # of one rank, by life


def read_earlier_lives(
    folder: Path, served: ServedWeights, settings: str, rank: int
) -> EarlierLives:
    """Reads all files of earlier lives, of all ranks: there may be more or fewer now.

    What was taken together is that of ``rank``'s files, where these weights were trained.
    Raises ``JournalError`` naming file and byte.
    """
    earlier = EarlierLives()
    version = served.version
    start = time.monotonic()
    for file in journal_files(folder):
        if file.life > version.attempt:
            raise JournalError(
                f"{file.path}: is of a later life than this one ({version.attempt}); the run's "
                "count of lives was lost, start a new run in another folder"
            )
        if file.life == version.attempt:
            continue  # another rank's, and not for this one
        header, records = read_file(file, version.v)
        if header is None:
            continue
        run = PolicyVersion.parse(header.version).run
        if (run, header.weights, header.settings) != (version.run, served.digest, settings):
            earlier.made_otherwise.update(
                record.key for _, record in records if not isinstance(record, TakenRecord)
            )
            continue
        earlier.versions.add(header.version)
        takes: list[TakenRecord] = []
        if file.rank == rank:
            earlier.takes.append(takes)
        for place, record in records:
            if isinstance(record, TakenRecord):
                takes.append(record)
                continue
            # Twice only if a later life did not see the first one, and trained its own.
            earlier.finished[record.key] = Finished(
                place, record.num_tokens, token_digest(record.prompt_token_ids)
            )
    if earlier.finished or earlier.made_otherwise:
        log.info(
            "batch %d: %d journalled groups are of these weights and settings, %d of others "
            "(%.1f s)",
            version.v,
            len(earlier.finished),
            len(earlier.made_otherwise),
            time.monotonic() - start,
        )
    return earlier
