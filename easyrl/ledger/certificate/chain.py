"""Lines that are bound to each other: none can be changed, removed or moved unseen.

A line is a JSON object: ``previous``, the hash of the line before; the record; ``digest``, the hash
of all bytes of the line before that member. Without a key this is evidence against accidents and
edits, not against somebody who rewrites the whole file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import Record

START = "0" * 32  # what the first line follows
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)
_PREFIX = b'{"previous":"%s",'
_SUFFIX = b',"digest":"%s"}'
_LINE_END = re.compile(rb',"digest":"[0-9a-f]{32}"\}')
_SUFFIX_LENGTH = len(_SUFFIX % START.encode())


@dataclass(frozen=True, slots=True)
class Line:
    """Where a sound line is."""

    number: int  # from 1
    start: int  # its first byte in the file
    length: int  # bytes, the newline not counted
    hash: str

    @classmethod
    def of(cls, number: int, start: int, data: bytes) -> Line:
        """``data`` is the line without its newline."""
        return cls(number, start, len(data), _hash(data))


def seal(record: Record, previous: str) -> bytes:
    """The line of ``record``, newline included, behind the line with the hash ``previous``."""
    body = _PREFIX % previous.encode() + _ENCODER.encode(record)[1:-1]
    return body + _SUFFIX % _hash(body).encode() + b"\n"


class ChainReader:
    """Iterates over a certificate's lines, checking each; ``end`` and ``torn`` are known then.

    A last line without an end was being written when the process died: it is not one. Raises
    ``CertificateError`` naming line and problem.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.end = 0  # bytes of whole lines
        self.torn = 0  # bytes behind them
        self.num_lines = 0
        self.last_hash = START

    def __iter__(self) -> Iterator[tuple[Line, Record]]:
        with self._path.open("rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    self._refuse_whole(data)
                    self.torn = len(data)
                    return
                yield self._line(data[:-1])

    def _line(self, data: bytes) -> tuple[Line, Record]:
        number = self.num_lines + 1
        record = unseal(data, number)
        if not data.startswith(_PREFIX % self.last_hash.encode()):
            before = f"line {number - 1}" if number > 1 else "the beginning"
            raise CertificateError(
                f"does not follow {before}: a line was removed, added, moved or changed",
                line=number,
            )
        line = Line.of(number, self.end, data)
        self.end += len(data) + 1
        self.num_lines = number
        self.last_hash = line.hash
        return line, record

    def _refuse_whole(self, data: bytes) -> None:
        """A cut-off line is the beginning of one, not a whole one with something behind it."""
        for end in _LINE_END.finditer(data):
            if end.end() < len(data) and is_sealed(data[: end.end()]):
                line = self.num_lines + 1
                raise CertificateError("its end was changed after it was written", line=line)


def read_record(file: BinaryIO, line: Line) -> Record:
    """``line``'s record, read again from ``file``."""
    file.seek(line.start)
    return unseal(file.read(line.length), line.number)


def unseal(data: bytes, number: int) -> Record:
    """The record of a line, newline not included. Raises ``CertificateError``."""
    if not is_sealed(data):
        raise CertificateError("it was changed after it was written", line=number)
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise CertificateError(f"is no line of a certificate: {error}", line=number) from error


def is_sealed(data: bytes) -> bool:
    """Whether a line, newline not included, is as it was written."""
    body = data[:-_SUFFIX_LENGTH]
    return data[-_SUFFIX_LENGTH:] == _SUFFIX % _hash(body).encode()


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)
