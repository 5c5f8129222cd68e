"""Writes a run's certificate. On rank 0 only."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from easyrl.ledger.certificate.chain import encode_line, refuse_other_seal
from easyrl.ledger.certificate.errors import CertificateError, OtherSettings
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import (
    AttemptRecord,
    Batch,
    EndRecord,
    Record,
    RunRecord,
)
from easyrl.ledger.certificate.seal import SealKey
from easyrl.runtime.durable_files import fsync, fsync_folder, remedy

# What has to stay as it was when a run is resumed: the setting that it comes from, if it is one.
SETTINGS = {
    "source": "source",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
    "batch_size": "trainer.batch_size",
}
DATA = ("num_prompts", "data")
MUST_STAY = ("run", *SETTINGS, *DATA)


class Certificate:
    """Appends lines and refuses what breaks the contract; each line is on the disk on return.

    Begins ``attempt`` of ``run`` in the file ``path``, whose folder is there. Raises
    ``CertificateError`` if what is there is broken, of another run, or has no place for this
    attempt; ``OtherSettings`` if the run was begun with others. Lines are sealed with ``key``.
    """

    def __init__(
        self, path: Path, run: RunRecord, attempt: AttemptRecord, key: SealKey | None = None
    ) -> None:
        self._path = path
        self._key = key
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._file = os.fdopen(descriptor, "r+b", 0)
        self._history = History(path, key)
        self._written = self._history.last
        try:
            self._begin(run, attempt)
        except CertificateError as error:
            self.close()
            raise error.in_folder(path.parent) from error
        except BaseException:
            self.close()
            raise

    def check(self, record: Batch, *, whole: bool) -> None:
        """Whether the next batch may be trained on; asked before each of its optimizer steps.

        ``record`` holds the updates until now; ``whole``: they are all. Raises
        ``CertificateError`` naming batch, prompt or endpoint.
        """
        self._history.examine(record, whole=whole)

    def close_batch(self, record: Batch) -> None:
        """Certifies a batch before its steps count as done. Same errors as ``check``."""
        self._append(record)

    def end(self, weights: str) -> None:
        """The run is complete and has the ``weights`` with this hash."""
        self._append(EndRecord(weights, len(self._history.batches)))

    @property
    def chain_hash(self) -> str:
        """Hash of the last line that is on the disk, which stands for all before it."""
        return self._written.hash

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()

    def _begin(self, run: RunRecord, attempt: AttemptRecord) -> None:
        """A last line that a crash cut off is dropped."""
        try:
            refuse_other_seal(self._path, with_key=self._key is not None)
        except ValueError as error:
            raise OtherSettings(str(error)) from error
        self._history.take_all()
        if self._history.run is not None:
            refuse_other_settings(self._history.run, run)
        self._written = self._history.last
        self._file.truncate(self._written.end)
        if self._history.run is None:
            self._append(run)
        self._append(attempt)
        fsync_folder(self._path.parent)

    def _append(self, record: Record) -> None:
        """One line, on the disk when this returns. Nothing can be added after one that failed.

        Raises ``OSError`` naming the file and the remedy.
        """
        data = encode_line(record, self._history.last.hash, self._key)
        line = self._history.last.following(data)
        self._history.take(line, record)
        try:
            self._file.seek(line.start)
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            fsync(self._file.fileno(), self._path)
        except OSError as error:
            with suppress(OSError):  # else what is there of it is dropped when the run goes on
                self._file.truncate(line.start)
            self.close()
            message = (
                f"a line of the certificate cannot be written ({error.strerror}); "
                f"{remedy(error)} and go on with --resume"
            )
            raise OSError(error.errno, message, str(self._path)) from error
        self._written = line


def refuse_other_settings(began: RunRecord, now: RunRecord) -> None:
    """Raises ``OtherSettings`` with all that has to be put back."""
    was, new = msgspec.structs.asdict(began), msgspec.structs.asdict(now)
    changed = [name for name in MUST_STAY if was[name] != new[name]]
    if not changed:
        return
    remedies = [f"put back {SETTINGS[name]}={json.dumps(was[name])}"
                for name in changed if name in SETTINGS]  # fmt: skip
    if set(changed) & set(DATA):
        remedies.append("put back data.* and the files that it names, as they were")
    problems = [f"{name} was {was[name]!r} when the run began and is {new[name]!r} now"
                for name in changed]  # fmt: skip
    last = "or start" if remedies else "start"
    remedy = ", ".join([*remedies, f"{last} a new run in another folder"])
    raise OtherSettings(f"{', '.join(problems)}; {remedy}", line=1)
