"""What the lines of a certificate say together: attempts, and batches that are in the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from easyrl.ledger.certificate.chain import ChainReader, Line, read_record
from easyrl.ledger.certificate.errors import CertificateError, located
from easyrl.ledger.certificate.record_rules import examine_records
from easyrl.ledger.certificate.records import (
    AttemptRecord,
    Batch,
    BatchRecord,
    EndRecord,
    Record,
    RecordsBatch,
    RunRecord,
)
from easyrl.ledger.certificate.rules import Context, examine
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.format import FORMAT, other_format


@dataclass(frozen=True, slots=True)
class CertifiedBatch:
    """A batch that is in the weights, and where its line is."""

    line: Line
    first_position: int  # prompts of the batches before it
    num_prompts: int
    last_step: int
    num_unconfirmed: int  # groups of attempts whose endpoints' confirmations nobody has certified


class History:
    """Takes the lines of ``path`` in their order and refuses one that cannot stand where it does.

    Only what needs comparing is held in memory: a batch's line is read again when it is wanted.
    """

    def __init__(self, path: Path, key: SealKey | None = None) -> None:
        self._path = path
        self._key = key
        self.sealed: bool | None = None  # whether its lines are; None: there is none
        self._nonces: dict[str, str] = {}  # of proofs: the version that each was drawn for
        self._base_nonces: dict[str, int] = {}  # of the model below adapters: the attempt
        self.run: RunRecord | None = None
        self.attempt: AttemptRecord | None = None
        self.attempts: dict[int, AttemptRecord] = {}
        self.batches: list[CertifiedBatch] = []  # effective ones; batches[v] is batch v
        self.end: EndRecord | None = None
        self.last = Line()
        self.hashes: dict[str, int] = {}  # of all lines, with their numbers
        self.torn = False  # whether a line was cut off behind the last one
        self.num_superseded = 0
        self.last_step = 0  # the highest that was ever certified
        self.open_batches: dict[int, int] = {}  # by attempt, the one behind its last certified one
        self._lines: dict[int, list[Line]] = {}  # by batch, of all attempts
        # place of a prompt in all epochs → batch that drew it
        self._owners = np.full(0, -1, np.int32)

    @property
    def num_certified(self) -> int:
        """The most batches that were ever in the weights, superseded ones included."""
        return max(self.open_batches.values(), default=0)

    @property
    def num_drawn(self) -> int:
        """Prompts of the effective batches, from the beginning of the order."""
        last = self.batches[-1:]
        return sum(batch.first_position + batch.num_prompts for batch in last)

    def batch(self, v: int) -> BatchRecord:
        """The account of the effective batch ``v``."""
        return self._read(self.batches[v].line)

    def records(self, v: int) -> RecordsBatch:
        """The same of a run on records."""
        record = read_record(self._path, self.batches[v].line)
        assert isinstance(record, RecordsBatch)
        return record

    def take_all(self) -> None:
        """Adds every line of the file. Raises ``CertificateError`` naming the line."""
        chain = ChainReader(self._path, self._key)
        for line, record in chain:
            with located(line=line.number):
                self.take(line, record)
        self.torn, self.sealed = chain.torn, chain.sealed

    def take_first(self) -> None:
        """Adds the first line alone, if there is one. Raises ``CertificateError``."""
        for line, record in ChainReader(self._path, self._key):
            self.take(line, record)
            return

    def take(self, line: Line, record: Record) -> None:
        """Adds ``record``, which ``line`` says. Raises ``CertificateError``."""
        match record:
            case RunRecord():
                if self.run is not None:
                    raise CertificateError("is a second run in the certificate of one")
                if record.format != FORMAT:
                    raise CertificateError(other_format(record.format))
                self.run = record
            case AttemptRecord():
                self._begin_attempt(record)
            case BatchRecord() | RecordsBatch():
                self._add(line, record, self.examine(record))
            case EndRecord():
                self._end(record)
        self.last = line
        self.hashes[line.hash] = line.number

    def examine(self, record: Batch, *, whole: bool = True) -> int:
        """Raises ``CertificateError`` if ``record`` cannot be the next batch.

        ``whole``: it is over, else more may come to it. Returns how many of its groups no
        confirmation is known of (``rules.examine``).
        """
        with located(batch=record.batch):
            if self.run is None or self.attempt is None:
                raise CertificateError("is a batch before any attempt of the run")
            self._refuse_out_of_order(record)
            epochs = self.attempt.epochs
            num_left = None if epochs is None else epochs * self.run.num_prompts - self.num_drawn
            num_unconfirmed = 0
            if isinstance(record, RecordsBatch):
                examine_records(record, self.run, self.attempt, num_left)
            else:
                earlier = [self._read(line) for line in self._lines.get(record.batch, [])]
                context = Context(self.run, self.attempt, earlier, num_left)
                num_unconfirmed = examine(record, context, whole=whole)
                self._refuse_asked_before(record)
            self._refuse_drawn_before(record)
            before = self.batches[-1].last_step if self.batches else 0
            if whole and record.step != before + record.num_updates:
                raise CertificateError(
                    f"step {record.step} is not behind step {before} of the batch before by the "
                    f"number of its updates, {record.num_updates}"
                )
        return num_unconfirmed

    def _read(self, line: Line) -> BatchRecord:
        record = read_record(self._path, line)
        assert isinstance(record, BatchRecord)
        return record

    def _begin_attempt(self, attempt: AttemptRecord) -> None:
        if self.run is None:
            raise CertificateError("is an attempt without a run: the first line is missing")
        if self.attempt is not None and attempt.attempt <= self.attempt.attempt:
            raise CertificateError(
                f"is attempt {attempt.attempt} after attempt {self.attempt.attempt}"
            )
        if attempt.first_batch > len(self.batches):
            raise CertificateError(
                f"attempt {attempt.attempt} starts at batch {attempt.first_batch}, but only "
                f"{len(self.batches)} are certified"
            )
        self.num_superseded += len(self.batches) - attempt.first_batch
        del self.batches[attempt.first_batch :]
        self._owners[self._owners >= attempt.first_batch] = -1
        self.attempt = self.attempts[attempt.attempt] = attempt
        self.open_batches[attempt.attempt] = attempt.first_batch
        self.end = None

    def _add(self, line: Line, record: Batch, num_unconfirmed: int) -> None:
        assert self.attempt is not None
        first = self.num_drawn
        places = self._positions(record)
        self.batches.append(
            CertifiedBatch(line, first, record.num_drawn, record.step, num_unconfirmed)
        )
        self.open_batches[self.attempt.attempt] = record.batch + 1
        self._owners[places] = record.batch
        self._lines.setdefault(record.batch, []).append(line)
        self.last_step = max(self.last_step, record.step)
        if isinstance(record, RecordsBatch):
            return
        for confirmation in record.confirmations:
            if confirmation.proof is not None:
                self._nonces[confirmation.proof.nonce] = record.version
            if confirmation.base is not None:  # its answer is repeated, in one attempt
                self._base_nonces[confirmation.base.nonce] = self.attempt.attempt

    def _end(self, end: EndRecord) -> None:
        if self.attempt is None:
            raise CertificateError("is the end of a run that has no attempt")
        if end.batches != len(self.batches):
            raise CertificateError(
                f"says that the run ended after {end.batches} batches, "
                f"{len(self.batches)} are certified"
            )
        assert self.run is not None
        epochs = self.attempt.epochs
        if self.run.source == "records" and epochs is not None:
            num_records = epochs * self.run.num_prompts
            if self.num_drawn < num_records:
                raise CertificateError(
                    f"says that the run is complete, {self.num_drawn} of {num_records} records "
                    "were trained"
                )
        self.end = end

    def _refuse_out_of_order(self, record: Batch) -> None:
        following = len(self.batches)
        if self.end is not None:
            raise CertificateError("comes after the end of the run")
        if record.batch > following:
            missing = f"{following}" + (f" to {record.batch - 1}" * (record.batch - 1 > following))
            raise CertificateError(f"batch {missing} is missing before it")
        if record.batch < following:
            line = self.batches[record.batch].line.number
            raise CertificateError(
                f"is certified already, in line {line}, and no attempt has started since at or "
                "before it"
            )

    def _refuse_drawn_before(self, record: Batch) -> None:
        places = self._positions(record)
        owners = self._owners[places]
        for place in np.flatnonzero(owners >= 0)[:1]:
            raise CertificateError(
                f"is in batch {owners[place]} already: it would be trained twice",
                key=record.groups[place].key,
            )

    def _refuse_asked_before(self, record: BatchRecord) -> None:
        """An answer to an earlier question would prove nothing."""
        assert self.attempt is not None
        for confirmation in record.confirmations:
            if (proof := confirmation.proof) is not None:
                version = self._nonces.get(proof.nonce, record.version)
                if version != record.version:
                    raise CertificateError(
                        f"was asked with the nonce of version {version}", endpoint=confirmation.url
                    )
            if (base := confirmation.base) is not None:
                attempt = self._base_nonces.get(base.nonce, self.attempt.attempt)
                if attempt != self.attempt.attempt:
                    raise CertificateError(
                        f"was asked for the model below the adapter with a nonce of attempt "
                        f"{attempt}",
                        endpoint=confirmation.url,
                    )

    def _positions(self, record: Batch) -> np.ndarray:
        """Place of each group's prompt among all prompts of all epochs, int64 [groups].

        Raises ``CertificateError`` for a key that the run does not have.
        """
        assert self.run is not None and self.attempt is not None
        num_prompts, epochs = self.run.num_prompts, self.attempt.epochs
        # The order goes through one epoch after the other.
        last = max((group.position for group in record.groups), default=0)
        last_epoch = (self.num_drawn + last) // num_prompts
        last_epoch = last_epoch if epochs is None else min(last_epoch, epochs - 1)
        for group in record.groups:
            if not (0 <= group.epoch <= last_epoch and 0 <= group.index < num_prompts):
                raise CertificateError("no such prompt", key=group.key)
        places = [group.epoch * num_prompts + group.index for group in record.groups]
        missing = max(places, default=-1) + 1 - len(self._owners)
        if missing > 0:
            more = max(missing, len(self._owners))
            self._owners = np.concatenate([self._owners, np.full(more, -1, np.int32)])
        return np.array(places, np.int64)
