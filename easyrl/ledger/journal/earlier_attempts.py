"""What earlier attempts left of a batch, and which of it was made as it would be made now.

The order in which groups are trained, which of them share a row, and which responses went through
the frozen models ahead of it, in which pieces, decide the last bits of the weights; the weights of
every later batch depend on them, and with them its journalled groups. So what the trainer drained
at once is drained so again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from easyrl.completion_check import CompletionLimits
from easyrl.ledger.journal.codec import (
    EVER,
    AnyRecord,
    CodecError,
    DrainRecord,
    GroupRecord,
    HandoverRecord,
    Header,
    WithdrawalRecord,
    decode_record,
    group_problem,
    to_group,
    token_digest,
)
from easyrl.ledger.journal.reading import (
    JournalFile,
    journal_files,
    last_drains,
    read_file,
)
from easyrl.ledger.journal.record_file import (
    DamagedRecord,
    JournalError,
    RecordLocation,
    read_record,
)
from easyrl.schema import Exclusion, Key, PolicyVersion, Prompt, RolloutGroup, ServedWeights

log = logging.getLogger(__name__)

MadeBy = Sequence[tuple[str, int]]  # endpoint and number of its proof, of each completion


def is_withdrawn(made_by: MadeBy, endpoint: str, proof: int) -> bool:
    """Whether ``endpoint`` made one of the completions since its proof number ``proof``."""
    return any(url == endpoint and number >= proof for url, number in made_by)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A journalled group: what is known of it without reading it again (a ``StoredGroup``)."""

    place: RecordLocation
    rank: int  # that finished it
    lengths: tuple[int, ...]  # tokens of the prompt, and of each response
    refused: bool
    exclusion: Exclusion | None
    made_by: MadeBy
    position: int  # in the batch
    prompt_digest: bytes  # ``codec.token_digest``
    prompt: Prompt | None = None  # where it is known
    times_s: tuple[float, float] | None = None  # dispatched, completed; None: an earlier attempt's
    handed_to: int | None = None  # rank; None: nobody
    drawn_by: int | None = None  # ``rank``, for another one that trains it

    @classmethod
    def of(cls, record: GroupRecord, place: RecordLocation, rank: int) -> StoredRecord:
        return cls(
            place,
            rank,
            record.lengths,
            record.refused,
            record.excluded,
            record.made_by,
            record.position,
            token_digest(record.prompt_token_ids),
        )

    @property
    def num_tokens(self) -> int:
        """Packed: P + ΣR."""
        return sum(self.lengths)

    @property
    def is_recovered(self) -> bool:
        """Finished in an earlier attempt."""
        return self.times_s is None

    @property
    def trains(self) -> int:
        """The rank that trained it, or was to."""
        return self.rank if self.handed_to is None else self.handed_to

    def load(self) -> RolloutGroup:
        """Raises ``JournalError`` if the record is no longer what it was."""
        assert self.prompt is not None
        payload = read_record(self.place)
        digest = self.place.digest.hex()
        try:
            group = to_group(decode_record(payload), self.prompt, digest, self.times_s)
        except CodecError as error:
            raise JournalError(f"{self.place.path}: byte {self.place.offset}: {error}") from error
        return replace(group, drawn_by=self.drawn_by)


class UnusableRecord(NamedTuple):
    """A journalled group that no trainer could take."""

    key: Key
    place: RecordLocation
    problem: str  # which response, of which endpoint, and why


@dataclass
class EarlierAttempts:
    """What earlier attempts left of a batch."""

    finished: dict[Key, StoredRecord] = field(default_factory=dict)  # by these weights
    versions: set[str] = field(default_factory=set)  # of attempts that made theirs
    # by other weights or settings, or withdrawn, or not to be trained
    made_otherwise: set[Key] = field(default_factory=set)
    unusable: list[UnusableRecord] = field(default_factory=list)
    damaged: list[tuple[Path, str]] = field(default_factory=list)  # files, and what is wrong
    drains: list[list[DrainRecord]] = field(default_factory=list)  # of one rank, by attempt


class Share:
    """What one rank of one attempt left of a batch: the groups that stand, and the withdrawn."""

    def __init__(self, file: JournalFile, header: Header | None = None) -> None:
        self.file = file
        # weights and settings that its groups were made with
        self.made_with = None if header is None else (header.weights, header.settings)
        self.groups: dict[Key, StoredRecord] = {}
        self.withdrawn: dict[Key, str] = {}  # the endpoint that failed a proof, or disagreed
        self.withdrawals: set[tuple[str, int]] = set()  # endpoint, number of restarts
        self.withdrawn_before: set[str] = set()  # endpoints, of which earlier attempts' groups too
        self.drains: list[DrainRecord] = []
        self.handovers: list[HandoverRecord] = []  # to this rank

    def add(self, place: RecordLocation, record: AnyRecord) -> None:
        match record:
            case DrainRecord():
                self.drains.append(record)
            case HandoverRecord():
                self.handovers.append(record)
            case WithdrawalRecord():
                self.withdrawals.add((record.endpoint, record.restart))
                self.withdraw(record.endpoint, record.proof)
                if record.proof == EVER:
                    self.withdrawn_before.add(record.endpoint)
            case GroupRecord():
                # Again only if it was withdrawn, or an attempt did not see an earlier one's.
                self.groups[record.key] = StoredRecord.of(record, place, self.file.rank)

    def withdraw(self, endpoint: str, proof: int) -> int:
        """Drops what ``endpoint`` had a part in since its ``proof``; the number of groups."""
        keys = [key for key, g in self.groups.items() if is_withdrawn(g.made_by, endpoint, proof)]
        for key in keys:
            del self.groups[key]
            self.withdrawn[key] = endpoint
        return len(keys)


def withdraw_untold(shares: Sequence[Share]) -> None:
    """Withdraws what other ranks of an attempt, and later attempts, did and a rank was not told."""
    for share in shares:
        for other in shares:
            if other.file.attempt > share.file.attempt and other.made_with == share.made_with:
                for endpoint in other.withdrawn_before:
                    share.withdraw(endpoint, 0)
            if other.file.attempt == share.file.attempt:
                for endpoint, restart in other.withdrawals:
                    # A later one took back the same, and more.
                    if not any(url == endpoint and n >= restart for url, n in share.withdrawals):
                        share.withdraw(endpoint, 0)


def standing_handovers(shares: Sequence[Share]) -> dict[str, int]:
    """By the digest of a group's record, the rank that it was handed over to last.

    When a batch begins again, what was handed over in it goes back: an attempt's hand-overs are
    those behind its last withdrawal.
    """
    ranks: dict[str, int] = {}
    for share in shares:  # by attempt
        begun = max((restart + 1 for _, restart in share.withdrawals), default=0)
        ranks |= {h.digest: share.file.rank for h in share.handovers if h.restart >= begun}
    return ranks


def read_earlier_attempts(
    folder: Path,
    served: ServedWeights,
    settings: str,
    rank: int,
    limits: CompletionLimits | None = None,
) -> EarlierAttempts:
    """Reads all files of earlier attempts, of all ranks: there may be more or fewer now.

    What was taken together is that of ``rank``'s files, where these weights were trained. Groups
    with a response beyond ``limits`` (``completion_problem``) are left out: an attempt that trained
    on one would end as the one before it did. Nothing is taken of a damaged file: what it says of
    withdrawals is lost as well. Raises ``JournalError`` naming file and byte.
    """
    earlier = EarlierAttempts()
    version = served.version
    start = time.monotonic()
    shares: list[Share] = []  # with these weights and settings
    for file in journal_files(folder):
        if file.attempt > version.attempt:
            raise JournalError(
                f"{file.path}: is of a later attempt than this one ({version.attempt}); the run's "
                "count of attempts was lost, start a new run in another folder"
            )
        if file.attempt == version.attempt:
            continue  # another rank's, and not for this one
        try:
            share = _read_share(file, served, settings, limits, earlier)
        except DamagedRecord as error:
            earlier.damaged.append((file.path, str(error)))
            continue
        except JournalError:
            if file.path.exists():
                raise
            continue  # another rank has set it aside meanwhile
        if share is None:
            continue
        shares.append(share)
        if file.rank == rank:
            earlier.drains.append(last_drains(share.drains))
    withdraw_untold(shares)
    trained_by = standing_handovers(shares)
    for share in shares:
        earlier.finished |= {
            key: replace(group, handed_to=trained_by.get(group.place.digest.hex()))
            for key, group in share.groups.items()
        }
        earlier.made_otherwise.update(share.withdrawn)
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


def _read_share(
    file: JournalFile,
    served: ServedWeights,
    settings: str,
    limits: CompletionLimits | None,
    earlier: EarlierAttempts,
) -> Share | None:
    """What stands in ``file``; None where it is empty, or of other weights or settings.

    What does not stand goes into ``earlier``.
    """
    version = served.version
    header, records = read_file(file, version.v)
    if header is None:
        return None
    run = PolicyVersion.parse(header.version).run
    if (run, header.weights, header.settings) != (version.run, served.digest, settings):
        earlier.made_otherwise.update(
            record.key for _, record in records if isinstance(record, GroupRecord)
        )
        return None
    share, unusable = Share(file, header), []
    for place, record in records:
        if limits is not None and isinstance(record, GroupRecord):
            if (problem := group_problem(record, limits)) is not None:
                unusable.append(UnusableRecord(record.key, place, problem))
                continue
        share.add(place, record)
    earlier.versions.add(header.version)
    earlier.unusable += unusable
    earlier.made_otherwise.update(record.key for record in unusable)
    return share


def usable_drains(
    drains: Iterable[DrainRecord], updates: Mapping[Key, int | None]
) -> list[DrainRecord]:
    """Those that can be repeated, up to the first that cannot.

    ``updates``: of each group that is there, the optimizer step that takes it, if that is certain.
    """
    usable: list[DrainRecord] = []
    left = dict(updates)
    for drain in drains:
        if any(left.pop(key, None) != drain.update for key in drain.keys):
            break
        usable.append(drain)
    return usable


def longest(attempts: Iterable[Sequence[DrainRecord]]) -> Sequence[DrainRecord]:
    """Of the latest attempt that took most: one that ended early has only begun to repeat them."""
    return max(reversed(list(attempts)), key=num_groups, default=())


def num_groups(drains: Sequence[DrainRecord]) -> int:
    """Groups in all ``drains``."""
    return sum(len(drain.keys) for drain in drains)
