"""Whether the journalled groups are what the certificate says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from easyrl.completion_check import completion_problem
from easyrl.ledger.certificate.errors import CertificateError, located
from easyrl.ledger.certificate.records import AttemptRecord, BatchRecord
from easyrl.ledger.journal.codec import CodecError, GroupRecord, to_completion, to_group
from easyrl.ledger.journal.earlier_attempts import Share, withdraw_untold
from easyrl.ledger.journal.reading import JournalFile, batch_folder, journal_files, read_file
from easyrl.ledger.journal.record_file import JournalError
from easyrl.ledger.journal.turns import (
    Sample,
    read_turns,
    trained_turns,
    turn_digest,
    turn_files,
)
from easyrl.ledger.traces import JOURNAL_FOLDER, refuse_missing_journal
from easyrl.schema import Completion, Episode, GroupOutcome, Key, PolicyVersion, RolloutGroup

# attempt → what its recipe decides of a group: a reason to reject it, or None
AcceptOf = Callable[[AttemptRecord], Callable[[RolloutGroup], str | None] | None]


@dataclass
class JournalEvidence:
    """Compares batches with the journal, which a live run may be pruning meanwhile."""

    run_dir: Path
    attempts: Mapping[int, AttemptRecord]  # of the run, by number
    accept_of: AcceptOf  # no function where what an attempt's recipe decides cannot be known
    num_replayed: int = 0  # decisions: groups whose outcome follows from the journal
    num_pruned: int = 0  # batches that it does not go back to, as it may
    num_unjournalled: int = 0  # groups that were never in it
    num_episodes: int = 0  # of groups that were trained
    num_turns: int = 0
    num_branches: int = 0
    num_episodes_without_turns: int = 0  # journalled one by one, as their attempt did
    num_untrained_turns: int = 0  # journalled, of episodes that no trained group has

    def examine(self, record: BatchRecord) -> None:
        """Raises ``CertificateError`` naming prompt and file where the two differ."""
        trained_on = {group.key: group for group in record.groups if group.digest is not None}
        self.num_unjournalled += len(record.groups) - len(trained_on)
        if not trained_on:
            return
        folder = batch_folder(self.run_dir / JOURNAL_FOLDER, record.batch)
        try:
            self._find(folder, record, trained_on)
        except CertificateError:
            if folder.is_dir():
                raise
            refuse_missing_journal(self.run_dir, record.batch)  # it may have gone meanwhile
            self.num_pruned += 1

    def _find(
        self, folder: Path, record: BatchRecord, trained_on: Mapping[Key, GroupOutcome]
    ) -> None:
        """Every group of ``trained_on`` is there as it was certified, and was not withdrawn."""
        shares: list[Share] = []
        others: dict[Key, tuple[str, str]] = {}  # not trained: digest and file
        try:
            turns = TurnEvidence(folder.parent, record.batch)
            for file in journal_files(folder):
                header, entries = read_file(file, record.batch)
                shares.append(share := Share(file, header))
                for place, entry in entries:
                    if isinstance(entry, GroupRecord):
                        digest, group = place.digest.hex(), trained_on.get(entry.key)
                        if group is None or group.digest != digest:
                            others[entry.key] = digest, file.name
                            continue
                        assert header is not None
                        with located(key=group.key, file=file.name):
                            self._compare(record, group, entry, header.weights)
                            turns.examine(file, group, entry)
                    share.add(place, entry)
        except JournalError as error:
            raise CertificateError(str(error)) from error
        withdraw_untold(shares)
        for key, group in trained_on.items():
            if not any(key in share.groups for share in shares):
                raise _not_found(group, shares, others.get(key), f"journal/{folder.name}")
            with located(key=key, file=f"journal/{folder.name}"):
                _refuse_other_ranks(group, shares)
        self.num_episodes_without_turns += turns.num_missing
        self.num_untrained_turns += turns.num_left

    def _compare(
        self, record: BatchRecord, group: GroupOutcome, entry: GroupRecord, weights: str
    ) -> None:
        """The record of a group that was trained, against the group's entry and the batch."""
        try:
            found = to_group(entry, entry.prompt(), str(group.digest))
        except CodecError as error:
            raise CertificateError(str(error)) from error
        for number, completion in enumerate(found.completions):
            problem = _span_problem(completion, record.accepted_versions)
            if group.accepted and (episode := completion.episode) is not None:
                self.num_episodes += 1
                self.num_turns += len(episode.turns)
                self.num_branches += episode.num_branches
            if problem := problem or completion_problem(completion):
                raise CertificateError(
                    f"response {number}: {problem}", endpoint=completion.endpoint
                )
        said = GroupOutcome.of(found)
        differences = (
            ("weights", record.weights, weights),
            ("versions on its tokens", group.stamped, said.stamped),
            ("endpoints", group.endpoints, said.endpoints),
            ("position", group.position, said.position),
            ("accepted", group.accepted, said.accepted),
            ("reason", group.reason, said.reason),
            ("kind of exclusion", group.exclusion, said.exclusion),
            ("recovered", group.recovered, entry.version != record.version),
        )
        for what, certified, journalled in differences:
            if certified != journalled:
                raise CertificateError(
                    f"{what}: {certified} in the certificate, {journalled} in the journal"
                )
        self._replay(record, found)

    def _replay(self, record: BatchRecord, found: RolloutGroup) -> None:
        """The recipe decides again."""
        attempt = self.attempts[PolicyVersion.parse(record.version).attempt]
        accept = self.accept_of(attempt)
        if accept is None:
            return
        if found.excluded is None:
            said = accept(found)
            said = said if said is None else said or "no reason given"  # as the producer keeps it
            if said != found.rejected:
                told, replayed = ("accepted" if reason is None else f"rejected ({reason})"
                                  for reason in (found.rejected, said))  # fmt: skip
                raise CertificateError(
                    f"is {told} in certificate and journal, its recipe says: {replayed}"
                )
        self.num_replayed += 1


class TurnEvidence:
    """Whether the turns of a batch's trained episodes were journalled as they were trained.

    Of an episode all turns of one start, in their order, and no other: nothing that was sampled for
    an episode and recorded is left out, nothing else is in it.
    """

    def __init__(self, directory: Path, batch: int) -> None:
        """Raises ``JournalError`` where a file of turns is not as it was written."""
        # by attempt and rank, then by sample: the digests of each start's turns
        self._starts: dict[tuple[int, int], dict[Sample, list[list[bytes]]]] = {}
        self.num_left = 0  # turns that no examined episode has
        self.num_missing = 0  # trained episodes whose turns are not there, as is allowed
        for file in turn_files(directory, batch):
            own = self._starts.setdefault((file.attempt, file.rank), {})
            by_start: dict[str, list[bytes]] = {}
            for turn in read_turns(file):
                if turn.episode not in by_start:
                    by_start[turn.episode] = []
                    own.setdefault((*turn.key, turn.sample), []).append(by_start[turn.episode])
                by_start[turn.episode].append(turn_digest(turn))
                self.num_left += 1

    def examine(self, file: JournalFile, group: GroupOutcome, entry: GroupRecord) -> None:
        """``entry``: the record of ``group`` in ``file``. Raises ``CertificateError``.

        A group that an earlier attempt has left may have outlived its turns, which are on the disk
        for certain when the batch is certified.
        """
        if not group.accepted:
            return
        starts = self._starts.get((file.attempt, file.rank))
        for number, stored in enumerate(entry.completions):
            if stored.episode is None or not stored.episode.turns:
                continue
            turns = trained_turns(to_completion(stored), group.key, number)
            digests = [turn_digest(turn) for turn in turns]
            if starts is not None and digests in starts.get((*group.key, number), []):
                self.num_left -= len(digests)
            elif starts is None or group.recovered:
                self.num_missing += 1
            else:
                raise CertificateError(
                    f"episode {number}: its {len(digests)} turns are not those that were "
                    "journalled before their answers went out"
                )


def _refuse_other_ranks(group: GroupOutcome, shares: Sequence[Share]) -> None:
    """The ranks that are said to have drawn and trained a group are those of the journal.

    Of a group from an earlier attempt only who drew it is known: there may have been more ranks.
    """
    if group.recovered and group.drawn_by is None:
        return
    drawn_by = group.rank if group.drawn_by is None else group.drawn_by
    found = {
        share.file.rank
        for share in shares
        if group.key in share.groups and share.groups[group.key].place.digest.hex() == group.digest
    }
    if drawn_by not in found:
        ranks = ", ".join(map(str, sorted(found))) or "none"
        raise CertificateError(
            f"drawn by: rank {drawn_by} in the certificate, {ranks} in the journal"
        )
    if drawn_by == group.rank or group.recovered:
        return
    told = {(share.file.rank, h.digest) for share in shares for h in share.handovers}
    if (group.rank, group.digest) not in told:
        raise CertificateError(
            f"was drawn by rank {drawn_by} and trained by rank {group.rank}, whose journal has no "
            "hand-over of it"
        )


def _span_problem(completion: Completion, accepted: list[str]) -> str | None:
    """Every sampled token has one version, and one that was trained."""
    if (episode := completion.episode) is not None:
        return _episode_span_problem(completion, episode, accepted)
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


def _episode_span_problem(
    completion: Completion, episode: Episode, accepted: list[str]
) -> str | None:
    """The same of what its turns have sampled; what the environment wrote has no version."""
    num_versions = np.zeros(len(completion.token_ids), dtype=np.int64)
    for span in completion.version_spans:
        if span.version not in accepted:
            return f"tokens {span.start} to {span.end} are of version {span.version}"
        num_versions[span.start : span.end] += 1
    sampled = np.zeros(len(completion.token_ids), dtype=np.int64)
    for turn in episode.turns:
        sampled[turn.sampled : turn.end] += 1
    wrong = np.flatnonzero(num_versions != sampled)
    if len(wrong):
        return (
            f"token {wrong[0]} has {num_versions[wrong[0]]} versions, its turns have sampled it "
            f"{sampled[wrong[0]]} times"
        )
    return None


def _not_found(
    group: GroupOutcome, shares: Sequence[Share], other: tuple[str, str] | None, folder: str
) -> CertificateError:
    """Why no record of ``group`` stands; ``other``: one of its prompt, and the file."""
    key, digest = group.key, str(group.digest)[:12]
    for share in shares:
        if (endpoint := share.withdrawn.get(key)) is not None:
            problem = f"counts, but its record {digest} was withdrawn: its endpoint failed a proof"
            return CertificateError(problem, key=key, endpoint=endpoint, file=share.file.name)
    if other is not None:
        found, file = other
        problem = f"its record is {found[:12]}, trained was {digest}: the journal was changed"
        return CertificateError(problem, key=key, file=file)
    problem = f"was trained, and its record {digest} is not in the journal"
    return CertificateError(problem, key=key, file=folder)
