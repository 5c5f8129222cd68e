"""Turns of episodes in the journal: each is there before its answer goes out.

A file beside that of the groups, which a resume does not have to read: what is trained are the
groups alone. A turn is there once, without the tokens of those that it continues; the file goes
with its batch's folder. What a killed attempt, or a start of an episode that was given up, has
sampled is found here and nowhere else. The episode is played again with the same seeds: an answer
that was recorded is of the attempt that recorded it, and is not given out by another one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from blake3 import blake3

from easyrl.ledger.journal.codec import (
    CodecError,
    GroupRecord,
    Header,
    StoredCompletion,
    StoredStruct,
    decode,
    encode,
    int32,
    to_completion,
    to_stored,
)
from easyrl.ledger.journal.reading import (
    JournalFile,
    batch_folder,
    journal_files,
    journalled_batches,
    read_file,
)
from easyrl.ledger.journal.record_file import (
    DIGEST_BYTES,
    JournalError,
    RecordWriter,
    read_records,
)
from easyrl.runtime.durable_files import fsync_folder
from easyrl.schema import Completion, JournalledTurn, Key, VersionSpan

_FILE = re.compile(r"attempt(\d+)-rank(\d+)\.turns")

Sample = tuple[int, int, int]  # epoch, prompt, number in its group


class TurnEntry(StoredStruct):
    """A record of the file, behind its header."""

    epoch: int
    index: int
    sample: int
    episode: str
    environment: str
    parent: int | None
    prompt_ids: bytes  # int32, beyond the parent's tokens
    completion: StoredCompletion
    kind: Literal["turn"] = "turn"  # last: it does not end in a zero byte


class TurnJournal:
    """The turns of one rank of one attempt in one batch. From any thread."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path, self._header = path, header
        self._writer: RecordWriter | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def add(self, turn: JournalledTurn) -> None:
        """It outlives this process when this returns; nothing once the batch is over.

        Raises ``JournalError``.
        """
        epoch, index = turn.key
        entry = TurnEntry(
            epoch,
            index,
            turn.sample,
            turn.episode,
            turn.environment,
            turn.parent,
            turn.prompt_ids.astype("<i4").tobytes(),
            to_stored(turn.completion),
        )
        payload = encode(entry)
        with self._lock:
            if self._is_closed:
                return  # its group was given up
            if self._writer is None:
                # durable with ``sync``: this is called where requests must not wait
                self._writer = RecordWriter(self._path, durable=False)
                self._writer.append(encode(self._header))
            self._writer.append(payload)

    def sync(self) -> None:
        """What was added outlives the machine going down. Raises ``JournalError``."""
        with self._lock:
            if self._writer is None or self._is_closed:
                return
            self._writer.sync()
        try:
            fsync_folder(self._path.parent)
        except OSError as error:
            raise JournalError(f"{self._path.parent}: cannot be synced: {error}") from error

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            if self._writer is not None and not self._is_closed:
                self._writer.close()
            self._is_closed = True


class EpisodeTurns(NamedTuple):
    """The turns of one start of an episode."""

    sample: Sample
    environment: str
    turns: list[JournalledTurn]


def turns_file_name(attempt: int, rank: int) -> str:
    return f"attempt{attempt}-rank{rank}.turns"


def turn_files(directory: Path, v: int) -> list[JournalFile]:
    """Those of batch ``v`` in the journal ``directory``, by attempt and rank."""
    found = []
    for path in batch_folder(directory, v).glob("*.turns"):
        if match := _FILE.fullmatch(path.name):
            found.append(JournalFile(int(match[1]), int(match[2]), path))
    return sorted(found)


def read_turns(file: JournalFile) -> Iterator[JournalledTurn]:
    """In the order in which they were recorded; without one that a crash has cut off.

    Raises ``JournalError`` naming file and byte.
    """
    for number, (place, payload) in enumerate(read_records(file.path)):
        try:
            if number == 0:
                decode(Header, payload, "a header of turns")
            else:
                yield _turn(decode(TurnEntry, payload, "a turn"))
        except CodecError as error:
            raise JournalError(f"{file.path}: byte {place.offset}: {error}") from error


def read_episodes(file: JournalFile) -> dict[str, EpisodeTurns]:
    """The turns of each start of an episode, by its name. Raises ``JournalError``."""
    episodes: dict[str, EpisodeTurns] = {}
    for turn in read_turns(file):
        start = EpisodeTurns((*turn.key, turn.sample), turn.environment, [])
        episodes.setdefault(turn.episode, start).turns.append(turn)
    return episodes


def unfinished_episodes(directory: Path) -> list[tuple[JournalFile, EpisodeTurns]]:
    """The starts of episodes whose group is not in the journal: of its newest batch.

    They are being played, or an attempt has ended before they did. Raises ``JournalError``.
    """
    batches = journalled_batches(directory)
    v = batches[-1] if batches else 0
    finished: dict[tuple[int, int], set[Key]] = {}
    for file in journal_files(batch_folder(directory, v)):
        records = (record for _, record in read_file(file, v)[1])
        keys = {record.key for record in records if isinstance(record, GroupRecord)}
        finished[file.attempt, file.rank] = keys
    return [
        (file, start)
        for file in turn_files(directory, v)
        for start in read_episodes(file).values()
        if start.sample[:2] not in finished.get((file.attempt, file.rank), ())
    ]


def turn_digest(turn: JournalledTurn) -> bytes:
    """Of all that a trained turn has to have in common with the journalled one."""
    entry = [turn.parent, turn.prompt_ids.astype("<i4").tobytes(), to_stored(turn.completion)]
    return blake3(encode(entry)).digest(length=DIGEST_BYTES)


def trained_turns(completion: Completion, key: Key, sample: int) -> list[JournalledTurn]:
    """The turns of an episode as they have to be in the journal."""
    episode = completion.episode
    assert episode is not None
    found = []
    for turn in episode.turns:
        sampled = slice(turn.sampled, turn.end)
        spans = tuple(
            VersionSpan(span.version, span.start - turn.sampled, span.end - turn.sampled)
            for span in completion.version_spans
            if turn.sampled <= span.start and span.end <= turn.end
        )
        made = Completion(
            completion.token_ids[sampled],
            completion.logprobs[sampled],
            turn.finish_reason,
            spans,
            turn.endpoint,
            completion.loss_mask[sampled],
            turn.proof,
        )
        shown = completion.token_ids[turn.start : turn.sampled]
        found.append(JournalledTurn(key, sample, "", episode.environment, turn.parent, shown, made))
    return found


def _turn(entry: TurnEntry) -> JournalledTurn:
    return JournalledTurn(
        (entry.epoch, entry.index),
        entry.sample,
        entry.episode,
        entry.environment,
        entry.parent,
        int32(entry.prompt_ids),
        to_completion(entry.completion),
    )
