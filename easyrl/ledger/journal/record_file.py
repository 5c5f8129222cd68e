"""A file of checksummed records that is only appended to, and what a crash leaves of it.

    magic line, then for each record
    length of the payload u32 · its complement u32 · blake3 of the payload, 16 bytes · payload

A killed process leaves a record that the end of the file cuts off; a machine that lost power may
leave zeros behind it, where the file had grown and its data had not come. No payload ends in a zero
byte, so that both are known from damage: what is *cut off* is dropped, what was *changed* is an
error (``DamagedRecord``), wherever it is.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from blake3 import blake3

from easyrl.ledger.format import FORMAT, other_format
from easyrl.runtime.durable_files import fsync, fsync_folder, remedy
from easyrl.schema import LedgerError

log = logging.getLogger(__name__)

FsyncPolicy = Literal["group", "batch", "never"]

MAGIC = b"EasyRL journal %d\n" % FORMAT
DIGEST_BYTES = 16
_OTHER_MAGIC = re.compile(rb"EasyRL journal (\d)\n")
_FRAME = struct.Struct(f"<II{DIGEST_BYTES}s")
_ALL_ONES = 0xFFFFFFFF
_BLOCK = 65536  # bytes read at a time where zeros are looked for


class JournalError(LedgerError):
    """A journal that cannot be written, or is not as it was written; names file and byte."""


class DamagedRecord(JournalError):
    """Bytes of a file are not those that were written; nothing of the file is to be relied on."""


class RecordLocation(NamedTuple):
    """Where a record is, and what it has to be."""

    path: Path
    offset: int  # of its frame
    digest: bytes  # blake3 of its payload, DIGEST_BYTES


class RecordWriter:
    """Writes a new file. Used by one thread at a time. All methods raise ``JournalError``."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """``durable``: the file's name survives the machine going down."""
        self._path = path
        self._failure: JournalError | None = None
        self._is_synced = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise JournalError(
                f"{path} is there already: another process writes to this run, or its count of "
                "attempts was lost; end the other one, or start a new run in another folder"
            ) from None
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._end = 0
        try:
            self._write(MAGIC)
            if durable:
                _sync_folder(path.parent)
                _sync_folder(path.parent.parent)
        except JournalError:
            os.close(self._file)
            path.unlink()
            raise

    def append(self, payload: bytes) -> RecordLocation:
        """One more record; handed to the operating system when this returns."""
        assert payload and payload[-1] != 0 and len(payload) < _ALL_ONES
        digest = blake3(payload).digest(length=DIGEST_BYTES)
        offset = self._end
        frame = _FRAME.pack(len(payload), len(payload) ^ _ALL_ONES, digest)
        self._write(frame + payload)
        return RecordLocation(self._path, offset, digest)

    def sync(self) -> None:
        """Returns when all records are on the disk."""
        self._raise_if_failed()
        if self._is_synced:
            return
        try:
            fsync(self._file, self._path)
        except OSError as error:  # what was lost would not be missed by a second call
            self._failure = _cannot_write(self._path, error)
            raise self._failure from error
        self._is_synced = True

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        self._raise_if_failed()
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:  # a full disk: the file ends behind its last whole record
            self._failure = _cannot_write(self._path, error)
            with suppress(OSError):  # a reader drops what was cut off
                os.ftruncate(self._file, self._end)
            raise self._failure from error
        self._end += len(data)
        self._is_synced = False

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure


def read_records(path: Path) -> Iterator[tuple[RecordLocation, bytes]]:
    """The records of a file, place and payload, in order; one that was cut off is dropped.

    Raises ``DamagedRecord`` where a record is not what was written, ``JournalError``.
    """
    try:
        with path.open("rb") as file:
            size = _used_size(file)
            magic = file.read(min(len(MAGIC), size))
            if magic != MAGIC:
                if not MAGIC.startswith(magic):
                    if other := _OTHER_MAGIC.fullmatch(magic):
                        raise JournalError(f"{path}: {other_format(int(other[1]))}")
                    raise DamagedRecord(f"{path}: byte 0: is not a journal")
                _warn_of_cut(path, 0)
                return
            at = len(MAGIC)
            while at < size:
                payload = _read_record(file, path, at, size)
                if payload is None:
                    _warn_of_cut(path, at)
                    return
                yield payload
                at = file.tell()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error}") from error


def read_record(place: RecordLocation) -> bytes:
    """The payload at ``place``. Raises ``JournalError`` if it is no longer what it was."""
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            record = _read_record(file, place.path, place.offset, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise JournalError(f"{place.path}: cannot be read: {error}") from error
    if record is None or record[0].digest != place.digest:
        raise _changed(place.path, place.offset)
    return record[1]


def _read_record(
    file: BinaryIO, path: Path, at: int, size: int
) -> tuple[RecordLocation, bytes] | None:
    """The record at ``at``, where ``file`` stands; None if byte ``size`` cuts it off."""
    if size - at < _FRAME.size:
        return None
    length, complement, digest = _FRAME.unpack(file.read(_FRAME.size))
    if length ^ complement != _ALL_ONES:
        raise _changed(path, at)
    if size - at < _FRAME.size + length:
        return None
    payload = file.read(length)
    if blake3(payload).digest(length=DIGEST_BYTES) != digest:
        raise _changed(path, at)
    return RecordLocation(path, at, digest), payload


def _used_size(file: BinaryIO) -> int:
    """Bytes without the zeros at the end; leaves ``file`` at its beginning."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        used = len(file.read(end - start).rstrip(b"\0"))
        if used:
            end = start + used
            break
        end = start
    file.seek(0)
    return end


def _sync_folder(folder: Path) -> None:
    """The names in ``folder`` survive the machine going down."""
    try:
        fsync_folder(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _warn_of_cut(path: Path, at: int) -> None:
    log.warning("%s: byte %d: this record was being written when its run ended; dropped", path, at)


def _changed(path: Path, at: int) -> DamagedRecord:
    return DamagedRecord(
        f"{path}: byte {at}: this record was changed after it was written; put the file back as it "
        "was, or remove it to have its groups generated again"
    )


def _cannot_write(path: Path, error: OSError) -> JournalError:
    return JournalError(
        f"{path}: cannot be written: {error}; {remedy(error)} and go on with --resume"
    )
