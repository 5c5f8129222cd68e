"""The open batch's journal: what earlier attempts left of it, and what this attempt adds."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from easyrl.completion_check import CompletionLimits
from easyrl.config import Config, RewardConfig
from easyrl.config.secrets import redact
from easyrl.dataloaders.producer.group_stream import Piece, StoredGroup
from easyrl.ledger.journal.codec import (
    EVER,
    DrainRecord,
    HandedGroup,
    HandoverRecord,
    Header,
    WithdrawalRecord,
    encode,
    to_record,
    token_bytes,
    token_digest,
)
from easyrl.ledger.journal.earlier_attempts import (
    MadeBy,
    Share,
    StoredRecord,
    UnusableRecord,
    is_withdrawn,
    longest,
    read_earlier_attempts,
    usable_drains,
)
from easyrl.ledger.journal.handed_record import HandedRecord
from easyrl.ledger.journal.reading import (
    JournalFile,
    batch_folder,
    file_name,
    journalled_batches,
)
from easyrl.ledger.journal.record_file import (
    FsyncPolicy,
    JournalError,
    RecordLocation,
    RecordWriter,
    read_record,
)
from easyrl.ledger.journal.turns import TurnJournal, turns_file_name
from easyrl.metrics.event_log import Record, ignore
from easyrl.schema import BatchWithdrawn, JournalledTurn, Key, Prompt, RolloutGroup, ServedWeights

PRUNED = ".gone"  # suffix of a batch that is being removed
# Keys of an environment that say nothing of what its episodes are.
NOT_OF_GROUPS = {"num_hosts", "start_timeout_s", "idle_timeout_s", "max_rollouts"}
DAMAGED = ".damaged"  # suffix of a file that is kept for people only

logger = logging.getLogger(__name__)


class BatchJournal:
    """The journal of one batch, bound to the weights that it is served with. From any thread."""

    def __init__(self, journal: Journal, served: ServedWeights) -> None:
        folder = batch_folder(journal.directory, served.version.v)
        earlier = read_earlier_attempts(
            folder, served, journal.settings, journal.rank, journal.limits
        )
        for path, problem in earlier.damaged:
            journal.set_aside(path, problem)
        for unusable in earlier.unusable if journal.rank == 0 else ():  # all ranks have read it
            if unusable.key not in earlier.finished:  # else an attempt since has drawn it again
                journal.tell_dropped(unusable)
        self._journal = journal
        self.served = served
        self.num_restarts = 0
        # this attempt's, and those of earlier ones that came to the same weights
        self.accepted_versions = frozenset({str(served.version)} | earlier.versions)
        # prompts whose groups were made by other weights or settings, withdrawn, or unusable
        self.discarded = frozenset(earlier.made_otherwise - earlier.finished.keys())
        self._finished = earlier.finished
        self._drains = earlier.drains
        path = folder / file_name(served.version.attempt, journal.rank)
        self._own = Share(JournalFile(served.version.attempt, journal.rank, path))
        turns = turns_file_name(served.version.attempt, journal.rank)
        self._turns = TurnJournal(folder / turns, self._header)
        self._lock = threading.Lock()
        self._writer: RecordWriter | None = None
        self._in_doubt: list[tuple[str, int]] = []  # endpoint and proof, withdrawn since it began
        self._closed = False

    def find(self, prompt: Prompt) -> StoredRecord | None:
        """The prompt's group if these weights made it in an earlier attempt, or since.

        Raises ``JournalError`` if it was another prompt then.
        """
        if (added := self._own.groups.get(prompt.key)) is not None:
            return added
        finished = self._finished.get(prompt.key)
        if finished is None:
            return None
        if finished.prompt_digest != token_digest(token_bytes(prompt)):
            raise JournalError(
                f"{finished.place.path}: byte {finished.place.offset}: prompt {prompt.index} of "
                f"epoch {prompt.epoch} had other tokens when this was journalled; resume with the "
                "same data, chat template and tokenizer, or start a new run"
            )
        drawn_by = None if finished.rank == self._journal.rank else finished.rank
        return replace(finished, prompt=prompt, drawn_by=drawn_by)

    def add(
        self, group: RolloutGroup, restart: int | None = None
    ) -> tuple[RolloutGroup, StoredRecord]:
        """Journals a group; it outlives this process when this returns. Raises ``JournalError``.

        ``restart``: the production that it comes from. ``BatchWithdrawn`` if that is over, or the
        group would have to be withdrawn: its producer is being ended.
        """
        key = group.prompt.key
        assert group.policy_version == str(self.served.version), "a group of another batch"
        record = to_record(group, self.served.digest)
        payload = encode(record)
        with self._lock:
            assert not self._closed, "the batch is over"
            self._refuse_withdrawn(record.made_by, restart)
            assert key not in self._own.groups, f"{key} was journalled before"
            assert key not in self._finished, f"{key} was journalled in an earlier attempt"
            place = self._append(payload)
            stored = self._own.groups[key] = replace(
                StoredRecord.of(record, place, self._journal.rank),
                prompt=group.prompt,
                times_s=(group.dispatched_s, group.completed_s),
            )
        return replace(group, digest=place.digest.hex()), stored

    def give(self, stored: StoredGroup) -> bytes:
        """A group that ``add`` has stored, for another rank. Raises ``JournalError``."""
        assert isinstance(stored, StoredRecord) and stored.times_s is not None
        began_s, ended_s = stored.times_s
        record = read_record(stored.place)
        return encode(
            HandedGroup(self._journal.rank, ended_s - began_s, record, stored.place.digest)
        )

    def receive(self, payload: bytes, prompt: Prompt, restart: int | None = None) -> HandedRecord:
        """Journals that this rank trains the group of another one.

        Its record is in the other's journal, and there alone. Raises as ``add`` does, and
        ``JournalError`` where the group is not the one that was sent.
        """
        handed = HandedRecord.of(payload, prompt)
        with self._lock:
            assert not self._closed, "the batch is over"
            self._refuse_withdrawn(handed.record.made_by, restart)
            told = HandoverRecord(prompt.key, handed.digest, handed.drawn_by, self.num_restarts)
            self._append(encode(told))
        return handed

    def add_turn(self, turn: JournalledTurn) -> None:
        """Journals a turn of an episode that is being played. Raises ``JournalError``."""
        self._turns.add(turn)

    def withdraw(self, endpoint: str, proof: int) -> int:
        """Drops the groups with a completion that ``endpoint`` made since its ``proof``.

        With ``EVER`` also those that it made for earlier attempts. They are generated again once
        the batch has begun again. Their number. Raises ``JournalError``.
        """
        with self._lock:
            self._in_doubt.append((endpoint, proof))
            num_withdrawn = self._own.withdraw(endpoint, proof)
            if proof == EVER:
                finished = self._finished.items()
                keys = {key for key, g in finished if is_withdrawn(g.made_by, endpoint, proof)}
                self._finished = {key: g for key, g in finished if key not in keys}
                self.discarded |= keys
                num_withdrawn += len(keys)
            # Also without a group: it tells that this rank knew of it (``earlier_attempts``).
            record = WithdrawalRecord(endpoint, proof, self.num_restarts)
            self._open_writer().append(encode(record))
        return num_withdrawn

    def begin_again(self) -> None:
        """The groups that are left are handed out anew, in any order; the others are produced."""
        with self._lock:
            self.num_restarts += 1
            self._in_doubt = []
            self._drains = []

    @property
    def added(self) -> list[StoredRecord]:
        """What this attempt has journalled, without what was withdrawn."""
        with self._lock:
            return list(self._own.groups.values())

    def add_drain(
        self, update: int, keys: Sequence[Key], max_tokens: int, ahead: Sequence[Piece] = ()
    ) -> None:
        """Journals what the trainer took together, and what it had computed ahead before.

        Raises ``JournalError``.
        """
        with self._lock:
            assert not self._closed, "the batch is over"
            drain = DrainRecord(list(keys), max_tokens, update, list(ahead), self.num_restarts)
            self._open_writer().append(encode(drain))

    def drained_before(self, updates: Mapping[Key, int | None]) -> Sequence[DrainRecord]:
        """What an earlier attempt drained at once, as far as it can be repeated.

        ``updates``: of each group that is there, its optimizer step, if that is certain.
        """
        return longest(usable_drains(drains, updates) for drains in self._drains)

    def sync(self) -> None:
        """What was added outlives the machine going down, unless the policy is never.

        Raises ``JournalError``, also for an earlier call that had failed.
        """
        if self._journal.fsync == "never":
            return
        self._turns.sync()  # a group that is certified has its turns
        with self._lock:
            if self._writer is not None:
                self._writer.sync()

    def close(self) -> None:
        """Nothing more is added; what was can still be loaded. Safe to call twice."""
        with self._lock:
            if self._writer is not None and not self._closed:
                self._writer.close()
            self._closed = True
        self._turns.close()

    def _refuse_withdrawn(self, made_by: MadeBy, restart: int | None) -> None:
        """Raises ``BatchWithdrawn`` for a group that comes too late."""
        if restart not in (None, self.num_restarts):
            raise BatchWithdrawn("the batch has begun again")
        for endpoint, proof in self._in_doubt:
            if is_withdrawn(made_by, endpoint, proof):
                raise BatchWithdrawn(f"{endpoint} failed its proof")

    def _append(self, payload: bytes) -> RecordLocation:
        """What must not be lost with the machine, where the policy says so."""
        place = self._open_writer().append(payload)
        if self._journal.fsync == "group":
            self._open_writer().sync()
        return place

    def _open_writer(self) -> RecordWriter:
        if self._writer is None:  # here and not before: making files takes long
            self._writer = RecordWriter(self._own.file.path, durable=self._journal.fsync != "never")
            self._writer.append(encode(self._header))
        return self._writer

    @property
    def _header(self) -> Header:
        return Header(self.served.digest, self._journal.settings, str(self.served.version))


class Production:
    """A ``GroupStore`` until the batch begins again: a group that comes later is refused."""

    def __init__(self, journal: BatchJournal) -> None:
        self._journal = journal
        self._restart = journal.num_restarts
        self.find = journal.find
        self.give = journal.give
        self.flush = journal.sync  # early, while the trainer is busy with the last groups

    def add(self, group: RolloutGroup) -> tuple[RolloutGroup, StoredRecord]:
        return self._journal.add(group, self._restart)

    def receive(self, payload: bytes, prompt: Prompt) -> HandedRecord:
        return self._journal.receive(payload, prompt, self._restart)


@dataclass(frozen=True)
class Journal:
    """The journal of one rank of one attempt of a run."""

    directory: Path  # of the run's journal, the same for all ranks and attempts
    attempt: int  # how often the run was started before; the attempt of its versions
    rank: int
    # after each group, once per batch, or never: a killed process loses nothing with any of them, a
    # machine that goes down may lose what was not written
    fsync: FsyncPolicy
    settings: str = ""  # ``group_settings``: groups that were made with others are discarded
    limits: CompletionLimits | None = None  # of earlier attempts' responses; None: no check
    record: Record = ignore

    def open_batch(self, served: ServedWeights) -> BatchJournal:
        """The journal of the batch that is generated by ``served``, with what was left of it.

        A file of an earlier attempt in which a record was changed is set aside. Raises
        ``JournalError`` where one is of another run, attempt or format.
        """
        assert served.version.attempt == self.attempt
        return BatchJournal(self, served)

    def tell_dropped(self, unusable: UnusableRecord) -> None:
        """Says that a group of the open batch is left where it is and drawn again."""
        (epoch, index), place, problem = unusable
        logger.warning(
            "%s: byte %d: the group of prompt %d of epoch %d cannot be trained and is drawn again: "
            "%s",
            place.path,
            place.offset,
            index,
            epoch,
            problem,
        )
        self.record("record_dropped", epoch=epoch, index=index, problem=problem)

    def set_aside(self, path: Path, problem: str) -> None:
        """A damaged file gets a name that nobody reads, and its groups are generated again."""
        aside = path.with_name(path.name + DAMAGED)
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            path.rename(aside)
        if self.rank == 0:
            logger.warning(
                "%s; set aside as %s, its groups are generated again", problem, aside.name
            )
            self.record("journal_set_aside", file=aside.name, problem=problem)

    def prune(self, before_v: int) -> None:
        """Removes the batches before ``before_v``. For one rank to call.

        One that cannot be removed (somebody reads it) is told in the log and tried again next time.
        """
        for left in self.directory.glob(f"*{PRUNED}"):  # also by an attempt that died here
            _remove(left)
        for v in journalled_batches(self.directory):
            if v < before_v:
                _remove(batch_folder(self.directory, v))


def _without_secrets(reward: RewardConfig) -> RewardConfig:
    """Another key for a judge does not make other groups."""
    return reward.model_copy(update={"kwargs": redact(reward.kwargs)})


def group_settings(config: Config, *, rejects: bool) -> str:
    """Digest of sampling, seed, rewards and environments, 32 hex digits; with the contents of their
    files.

    A run that is resumed with others generates the open batch's groups again. What only decides
    what happens after a failure is not in it, nor how many are played at a time, nor a recipe that
    ``rejects`` no group.
    """
    digest = blake3()
    parts = [
        config.rollout.model_dump_json(exclude={"queue_size"}),
        str(config.run.seed),
        str(config.scoring.truncated_reward),
        *(_without_secrets(reward).model_dump_json() for reward in config.rewards),
    ]
    if config.environments:
        parts.append(config.data.tool_parser)
        for environment in config.environments:
            played = environment.model_dump(mode="json", exclude=NOT_OF_GROUPS)
            parts.append(json.dumps(redact(played), sort_keys=True))
    for part in parts:
        digest.update(part.encode() + b"\n")
    if rejects:
        digest.update(config.recipe.model_dump_json().encode() + b"\n")
        if config.recipe.file is not None:
            digest.update(config.recipe.file.read_bytes())
    for file in _files_of_groups(config):
        digest.update(file.read_bytes())
    return digest.hexdigest(length=16)


def _files_of_groups(config: Config) -> list[Path]:
    """The user's own, that rewards and environments are made of."""
    files = [reward.file for reward in config.rewards]
    for environment in config.environments:
        files.append(environment.file)
        files += [reward.file for reward in environment.rewards]
        files += [tools.file for tools in environment.tools]
    return [file for file in files if file is not None]


def _remove(folder: Path) -> None:
    """Never leaves half a batch under its name."""
    try:
        if folder.suffix != PRUNED:
            folder = folder.rename(folder.with_name(folder.name + PRUNED))
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s is not needed any more and cannot be removed yet: %s", folder, error)
