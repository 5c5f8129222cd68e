"""What earlier attempts left of a batch, and which of it was made as it would be made now."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from easyrl.ledger.journal.codec import (
    DrainRecord,
    GroupRecord,
    WithdrawalRecord,
    token_digest,
)
from easyrl.ledger.journal.reading import journal_files, read_file
from easyrl.ledger.journal.record_file import JournalError, RecordLocation
from easyrl.schema import Key, PolicyVersion, ServedWeights

log = logging.getLogger(__name__)


MadeBy = Sequence[tuple[str, int]]  # endpoint and number of its proof, of each completion


def is_withdrawn(made_by: MadeBy, endpoint: str, proof: int) -> bool:
    """Whether ``endpoint`` made one of the completions since its proof number ``proof``."""
    return any(url == endpoint and number >= proof for url, number in made_by)


@dataclass(frozen=True, slots=True)
class Finished:
    """An earlier attempt's group: what is known of it without reading it again."""

    place: RecordLocation
    num_tokens: int  # packed: P + ΣR
    prompt_digest: bytes  # ``codec.token_digest``
    rank: int  # that finished it
    refused: bool


@dataclass
class EarlierAttempts:
    """What earlier attempts left of a batch."""

    finished: dict[Key, Finished] = field(default_factory=dict)  # by these weights
    versions: set[str] = field(default_factory=set)  # of attempts that made theirs
    made_otherwise: set[Key] = field(default_factory=set)  # other weights or settings, or withdrawn
    drains: list[list[DrainRecord]] = field(default_factory=list)  # of one rank, by attempt


def read_earlier_attempts(
    folder: Path, served: ServedWeights, settings: str, rank: int
) -> EarlierAttempts:
    """Reads all files of earlier attempts, of all ranks: there may be more or fewer now.

    What was taken together is that of ``rank``'s files, where these weights were trained.
    Raises ``JournalError`` naming file and byte.
    """
    earlier = EarlierAttempts()
    version = served.version
    start = time.monotonic()
    for file in journal_files(folder):
        if file.attempt > version.attempt:
            raise JournalError(
                f"{file.path}: is of a later attempt than this one ({version.attempt}); the run's "
                "count of attempts was lost, start a new run in another folder"
            )
        if file.attempt == version.attempt:
            continue  # another rank's, and not for this one
        header, records = read_file(file, version.v)
        if header is None:
            continue
        run = PolicyVersion.parse(header.version).run
        if (run, header.weights, header.settings) != (version.run, served.digest, settings):
            earlier.made_otherwise.update(
                record.key for _, record in records if isinstance(record, GroupRecord)
            )
            continue
        earlier.versions.add(header.version)
        drains: list[DrainRecord] = []
        if file.rank == rank:
            earlier.drains.append(drains)
        groups: dict[Key, tuple[Finished, MadeBy]] = {}  # of this file
        for place, record in records:
            match record:
                case DrainRecord():
                    drains.append(record)
                case GroupRecord():
                    # Again only if it was withdrawn, or an attempt did not see an earlier one's.
                    groups[record.key] = (
                        Finished(
                            place,
                            record.num_tokens,
                            token_digest(record.prompt_token_ids),
                            file.rank,
                            record.refused,
                        ),
                        record.made_by,
                    )
                case WithdrawalRecord():
                    withdrawn = [
                        key
                        for key, (_, made_by) in groups.items()
                        if is_withdrawn(made_by, record.endpoint, record.proof)
                    ]
                    for key in withdrawn:
                        del groups[key]
                        earlier.made_otherwise.add(key)
                    drains.clear()  # the batch began again
        earlier.finished |= {key: finished for key, (finished, _) in groups.items()}
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
