"""Lines that are bound to each other: none can be changed, removed or moved unseen.

A line is a JSON object: ``previous``, the hash of the line before; the record; ``digest``, the hash
of all bytes of the line before that member; with a key also ``seal`` (``seal.py``). Without one
this is evidence against accidents and edits, not against somebody who rewrites the whole file,
unless the last line's hash was published.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import Record
from easyrl.ledger.certificate.seal import SealKey

START = "0" * 32  # the hash that the first line follows
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)
_PREFIX = b'{"previous":"%s",'
_DIGEST = b',"digest":"%s"'
_SEAL = b',"seal":"%s"'
LONGEST_END = 128  # bytes of a line's digest and seal
_LINE_END = re.compile(rb',"digest":"([0-9a-f]{32})"(?:,"seal":"([0-9a-f]{64})")?\}')


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


def encode_line(record: Record, previous: str, key: SealKey | None = None) -> bytes:
    """The line of ``record``, newline included, behind the line with the hash ``previous``."""
    line = _PREFIX % previous.encode() + _ENCODER.encode(record)[1:-1]
    line += _DIGEST % _hash(line).encode()
    if key is not None:
        line += _SEAL % key.seal(line)
    return line + b"}\n"


def chain_hash(path: Path) -> str:
    """Hash of the last line of a certificate, which stands for all before it."""
    last = Line()
    with path.open("rb") as file:
        for data in file:
            if data.endswith(b"\n"):
                last = last.following(data)
    return last.hash


class ChainReader:
    """Iterates over a certificate's lines, checking each; ``last`` and ``torn`` are known then.

    A last line without an end was being written when the process died: it is not one. ``sealed``:
    whether the lines have seals, which are checked with ``key``; all have, or none. Raises
    ``CertificateError`` naming line and problem.
    """

    def __init__(self, path: Path, key: SealKey | None = None) -> None:
        self._path = path
        self._key = key
        self.last = Line()
        self.torn = False
        self.sealed: bool | None = None  # None: there is no line

    def __iter__(self) -> Iterator[tuple[Line, Record]]:
        with self._path.open("rb") as file:
            for data in file:
                line = self.last.following(data)
                if not data.endswith(b"\n"):
                    _refuse_whole(data, line.number)
                    self.torn = True
                    return
                record = _decode(data, line.number)
                self._examine_seal(data, line.number)
                if not data.startswith(_PREFIX % self.last.hash.encode()):
                    before = f"line {self.last.number}" if self.last.number else "the beginning"
                    raise CertificateError(
                        f"does not follow {before}: a line was removed, added, moved or changed",
                        line=line.number,
                    )
                self.last = line
                yield line, record

    def _examine_seal(self, data: bytes, number: int) -> None:
        end = _whole_end(data[:-1])
        assert end is not None, "the line was decoded"
        seal = end.group(2)
        if self.sealed is None:
            self.sealed = seal is not None
        if self.sealed != (seal is not None):
            words = "has no seal, unlike" if self.sealed else "has a seal, unlike"
            raise CertificateError(f"{words} the lines before it", line=number)
        if self._key is None:
            return
        if seal is None:
            raise CertificateError("has no seal", line=number)
        if not hmac.compare_digest(seal, self._key.seal(data[: end.end(1) + 1])):
            raise CertificateError("its seal was not made with this key", line=number)


def refuse_other_seal(path: Path, *, with_key: bool) -> None:
    """Raises ``ValueError`` if a run with this certificate cannot go on with, or without, a key."""
    first = b""
    if path.exists():
        with path.open("rb") as file:
            first = file.readline()
    if not first.endswith(b"\n") or (end := _whole_end(first[:-1])) is None:
        return  # there is none, or reading it says what is wrong
    if end.group(2) is not None and not with_key:
        raise ValueError(
            "the run is sealed: go on with --seal and the key file that it was begun with"
        )
    if end.group(2) is None and with_key:
        raise ValueError(
            "the run was begun without --seal; go on without, or seal a new run from its first line"
        )


def read_record(path: Path, line: Line) -> Record:
    """``line``'s record, read again from the certificate ``path``."""
    with path.open("rb") as file:
        file.seek(line.start)
        return _decode(file.read(line.end - line.start), line.number)


def _decode(data: bytes, number: int) -> Record:
    """The record of a line, newline included. Raises ``CertificateError``."""
    if _whole_end(data[:-1]) is None:
        raise CertificateError("it was changed after it was written", line=number)
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise CertificateError(f"is no line of a certificate: {error}", line=number) from error


def _refuse_whole(data: bytes, number: int) -> None:
    """A cut-off line is the beginning of one, not a whole one with something behind it."""
    for end in _LINE_END.finditer(data):
        if end.end() < len(data) and _whole_end(data[: end.end()]):
            raise CertificateError("its end was changed after it was written", line=number)


def _whole_end(data: bytes) -> re.Match[bytes] | None:
    """Digest and seal of a line, newline not included, that is as it was written."""
    for end in _LINE_END.finditer(data, max(0, len(data) - LONGEST_END)):
        if end.end() == len(data) and end.group(1) == _hash(data[: end.start()]).encode():
            return end
    return None


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)
