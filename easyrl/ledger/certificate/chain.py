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

import msgspec
from blake3 import blake3

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import Record

START = "0" * 32  # the hash that the first line follows
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)
_PREFIX = b'{"previous":"%s",'
_SUFFIX = b',"digest":"%s"}'
_LINE_END = re.compile(rb',"digest":"[0-9a-f]{32}"\}')
_SUFFIX_LENGTH = len(_SUFFIX % START.encode())


@dataclass(frozen=True, slots=True)
class Line:
    """Where a sound line is; made without arguments, where the first one begins."""

    number: int = 0  # from 1
    start: int = 0  # its first byte in the file
    end: int = 0  # the byte behind its newline
    hash: str = START

    def following(self, data: bytes) -> Line:
        """The line behind it, ``data`` with its newline."""
        return Line(self.number + 1, self.end, self.end + len(data), _hash(data[:-1]))


def seal(record: Record, previous: str) -> bytes:
    """The line of ``record``, newline included, behind the line with the hash ``previous``."""
    body = _PREFIX % previous.encode() + _ENCODER.encode(record)[1:-1]
    return body + _SUFFIX % _hash(body).encode() + b"\n"


class ChainReader:
    """Iterates over a certificate's lines, checking each; ``last`` and ``torn`` are known then.

    A last line without an end was being written when the process died: it is not one. Raises
    ``CertificateError`` naming line and problem.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last = Line()
        self.torn = False

    def __iter__(self) -> Iterator[tuple[Line, Record]]:
        with self._path.open("rb") as file:
            for data in file:
                line = self.last.following(data)
                if not data.endswith(b"\n"):
                    _refuse_whole(data, line.number)
                    self.torn = True
                    return
                record = _unseal(data, line.number)
                if not data.startswith(_PREFIX % self.last.hash.encode()):
                    before = f"line {self.last.number}" if self.last.number else "the beginning"
                    raise CertificateError(
                        f"does not follow {before}: a line was removed, added, moved or changed",
                        line=line.number,
                    )
                self.last = line
                yield line, record


def read_record(path: Path, line: Line) -> Record:
    """``line``'s record, read again from the certificate ``path``."""
    with path.open("rb") as file:
        file.seek(line.start)
        return _unseal(file.read(line.end - line.start), line.number)


def _unseal(data: bytes, number: int) -> Record:
    """The record of a line, newline included. Raises ``CertificateError``."""
    if not _is_sealed(data[:-1]):
        raise CertificateError("it was changed after it was written", line=number)
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise CertificateError(f"is no line of a certificate: {error}", line=number) from error


def _refuse_whole(data: bytes, number: int) -> None:
    """A cut-off line is the beginning of one, not a whole one with something behind it."""
    for end in _LINE_END.finditer(data):
        if end.end() < len(data) and _is_sealed(data[: end.end()]):
            raise CertificateError("its end was changed after it was written", line=number)


def _is_sealed(data: bytes) -> bool:
    """Whether a line, newline not included, is as it was written."""
    body = data[:-_SUFFIX_LENGTH]
    return data[-_SUFFIX_LENGTH:] == _SUFFIX % _hash(body).encode()


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)
