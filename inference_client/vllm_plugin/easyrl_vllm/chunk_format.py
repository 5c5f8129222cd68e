"""One chunk file: what the trainer announced of it, and its safetensors header checked against it.

The format: 8 bytes of length, a JSON header ``{name: {dtype, shape, data_offsets}}``, the tensors'
bytes without a hole (huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .reading import ChunkStream, check_component

HASH = re.compile(r"[0-9a-f]{64}")
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    start: int  # its bytes' offsets behind the header
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the trainer says of one safetensors file of an artifact."""

    file: str  # name inside the artifact's directory
    num_bytes: int  # of the tensors in it
    checksums: Mapping[str, str]  # name as ``save_pretrained`` writes it -> blake3, 64 hex digits
    entries: tuple[Entry, ...] = ()  # of its header, known to its writer
    proof_follows: bool = False  # nothing is generated with it before its bits are proved

    def describe(self, *, proof_follows: bool = False) -> dict[str, Any]:
        """As ``parse`` takes it."""
        promise = {"proof_follows": True} if proof_follows else {}
        described = {"file": self.file, "num_bytes": self.num_bytes, "checksums": self.checksums}
        return described | promise

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Chunk:
        """Raises ``ValueError`` naming the field."""
        try:
            file, num_bytes, checksums = (record[k] for k in ("file", "num_bytes", "checksums"))
        except (KeyError, TypeError):
            raise ValueError(f"chunk: needs file, num_bytes and checksums, is {record!r}") from None
        check_component("file", file)
        if not isinstance(num_bytes, int) or num_bytes < 0:
            raise ValueError(f"{file}: num_bytes {num_bytes!r} is not a number of bytes")
        if not isinstance(checksums, Mapping):
            raise ValueError(f"{file}: checksums must map names to hashes")
        for name, checksum in checksums.items():
            if not isinstance(checksum, str) or not HASH.fullmatch(checksum):
                raise ValueError(f"{file}: {checksum!r} of tensor {name!r} is not a blake3 hash")
        proof_follows = record.get("proof_follows") is True
        return cls(file, num_bytes, checksums, proof_follows=proof_follows)


def read_header(stream: ChunkStream, chunk: Chunk, where: str) -> list[Entry]:
    """The tensors in the order of their bytes, which are the rest of ``stream``.

    Raises ``ValueError`` naming the file, ``where``, if it holds other tensors, or more or fewer
    bytes, than announced.
    """
    raw = _header_bytes(stream, chunk, where)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [_entry(name, record) for name, record in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a safetensors header ({error!r})") from None
    if missing := sorted(chunk.checksums.keys() - header.keys()):
        raise ValueError(f"{where}: does not hold tensor {missing[0]!r}")
    if unexpected := sorted(header.keys() - chunk.checksums.keys()):
        raise ValueError(f"{where}: no checksum was given for tensor {unexpected[0]!r}")
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = 0
    for entry in entries:
        if entry.start != position or entry.end - entry.start != entry.num_bytes:
            raise ValueError(f"{where}: tensor {entry.name!r} is not where its shape says")
        position = entry.end
    if position != chunk.num_bytes:
        raise ValueError(f"{where}: tensors of {position} bytes, announced {chunk.num_bytes}")
    return entries


def _header_bytes(stream: ChunkStream, chunk: Chunk, where: str) -> bytes:
    if stream.size < 8:
        raise ValueError(f"{where}: {stream.size} bytes are no safetensors file")
    length = np.empty(8, np.uint8)
    stream.fill(length)
    num_bytes = int.from_bytes(length.tobytes(), "little")
    if stream.size != 8 + num_bytes + chunk.num_bytes:
        raise ValueError(
            f"{where}: has {stream.size} bytes, but header ({num_bytes}) and announced tensors "
            f"({chunk.num_bytes}) are {8 + num_bytes + chunk.num_bytes}"
        )
    most = 2**17 + sum(1024 + 6 * len(name) for name in chunk.checksums)
    if num_bytes > most:
        raise ValueError(f"{where}: a header of {num_bytes} bytes is too long")
    raw = np.empty(num_bytes, np.uint8)
    stream.fill(raw)
    return raw.tobytes().rstrip()  # padding takes the parser longer than the rest


def _entry(name: str, record: Mapping[str, Any]) -> Entry:
    dtype = DTYPES[record["dtype"]]
    shape = tuple(int(size) for size in record["shape"])
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    start, end = map(int, record["data_offsets"])
    return Entry(name, dtype, shape, math.prod(shape) * dtype.itemsize, start, end)
