"""One rank's share of the engine's state as a safetensors file, and all shares read back.

Every piece is a range of a flattened tensor, or of some columns of it. Where it starts stands in
the file's metadata: of whole rows in the form that ``torch.distributed.checkpoint`` reads
(``HuggingFaceStorageReader``), of columns in one of our own, which that reader refuses.
"""

from __future__ import annotations

import errno
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from easyrl.engines.base import Columns, StateFile, StatePiece
from easyrl.engines.state_ranges import StateRange, common
from easyrl.runtime.durable_files import fsync

BLOCK_BYTES = 8 * 2**20  # written and hashed at a time, the interpreter free meanwhile
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
SHARDING, COLUMNS = "DCP_SHARDING_INFO", "columns"


@dataclass(frozen=True, slots=True)
class EngineState:
    """One rank's share of what a run goes on from (``Snapshot``)."""

    pieces: list[StatePiece]
    description: dict[str, Any]  # JSON, equal on all ranks

    def write(self, folder: Path, stem: str) -> list[StateFile]:
        """One file. Raises ``OSError`` naming it."""
        name = f"{stem}.safetensors"
        num_bytes, digest = write_state_file(folder / name, self.pieces)
        return [StateFile(name, num_bytes, digest)]


def write_state_file(path: Path, pieces: Sequence[StatePiece]) -> tuple[int, str]:
    """Writes and fsyncs; number of bytes, blake3 of the whole file in 64 hex digits.

    Raises ``OSError`` naming file and bytes if the disk is full. The tensors go to the file as they
    lie in memory; no second copy is made.
    """
    # large elements first, so that each tensor is aligned to its own
    ordered = sorted(pieces, key=lambda piece: -piece.values.element_size())
    tensors = [piece.values.contiguous().view(torch.uint8).numpy().data for piece in ordered]
    blocks = [memoryview(_header(ordered)), *tensors]
    digest = blake3()
    num_bytes = sum(map(len, blocks))
    try:
        with path.open("xb") as file:
            for block in blocks:
                for start in range(0, len(block), BLOCK_BYTES):
                    part = block[start : start + BLOCK_BYTES]
                    digest.update(part)
                    file.write(part)
            file.flush()
            fsync(file.fileno(), path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        message = f"no room for {num_bytes} bytes of state ({error.strerror})"
        raise OSError(error.errno, message, str(path)) from error
    return num_bytes, digest.hexdigest()


class StateReader:
    """All ranks' files as one state (``SavedState``), whatever layout wrote it.

    To be closed; files are mapped, so only what is asked for is read.
    """

    def __init__(self, files: Sequence[Path], description: Mapping[str, Any]) -> None:
        self.files, self.description = files, description
        self._opened = ExitStack()
        self._pieces: dict[str, list[tuple[StateRange, Any]]] = defaultdict(list)
        for file in files:
            opened = self._opened.enter_context(safe_open(file, framework="pt"))
            metadata = opened.metadata()
            starts = json.loads(metadata[SHARDING])
            columns = json.loads(metadata.get(COLUMNS, "{}"))
            for key in opened.keys():  # noqa: SIM118 - not a dict
                (numel,) = opened.get_slice(key).get_shape()
                if key in columns:
                    start, *of_matrix = columns[key]
                    saved = StateRange(start, numel, Columns(*of_matrix))
                else:
                    saved = StateRange(starts[key]["saved_offsets"][0], numel)
                self._pieces[key].append((saved, opened))

    def keys(self) -> frozenset[str]:
        """Of all ranks."""
        return frozenset(self._pieces)

    def numel(self, key: str) -> int:
        """Elements of the whole tensor; 0 if there is none of that name."""
        return max((saved.end_in_tensor for saved, _ in self._pieces.get(key, ())), default=0)

    def read(self, key: str, start: int, numel: int, columns: Columns | None = None) -> Tensor:
        """Elements ``[start, start + numel)`` of the flattened tensor, or of its flattened
        ``columns``; [numel], on the CPU.

        Raises ``ValueError`` if some of them are in no file, or the tensor has longer rows.
        """
        wanted = StateRange(start, numel, columns)
        pieces = self._pieces.get(key, ())
        for saved, opened in pieces:
            if wanted.lies_in(saved):  # always so in the layout that has written it
                first = start - saved.start
                part: Tensor = opened.get_slice(key)[first : first + numel]
                return part
        whole = torch.empty(0)
        missing = torch.ones(numel, dtype=torch.bool)
        for saved, opened in pieces:
            if columns and saved.columns and columns.of != saved.columns.of:
                raise ValueError(f"{key} has {saved.columns.of} columns, now {columns.of}")
            for both in common(saved, wanted):
                stored = opened.get_slice(key)[both.stored]
                if len(whole) != numel:
                    whole = stored.new_empty(numel)
                both.of_wanted(whole).copy_(both.of_stored(stored))
                both.of_wanted(missing).fill_(False)
        if missing.any():
            first = start + int(missing.int().argmax())
            raise ValueError(f"the checkpoint lacks elements {first} and on of {key}")
        return whole

    def close(self) -> None:
        self._opened.close()


def _header(pieces: Sequence[StatePiece]) -> bytes:
    """Length and JSON of the safetensors format, padded to 8 bytes."""
    assert len({piece.key for piece in pieces}) == len(pieces), "a key comes twice"
    rows = {p.key: {"saved_offsets": [p.start]} for p in pieces if p.columns is None}
    columns = {p.key: [p.start, *p.columns] for p in pieces if p.columns is not None}
    metadata = {"format": "pt", SHARDING: json.dumps(rows)}
    if columns:
        metadata[COLUMNS] = json.dumps(columns)
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for piece in pieces:
        assert piece.values.ndim == 1 and piece.values.device.type == "cpu"
        end = position + piece.values.nbytes
        entries[piece.key] = {
            "dtype": DTYPE_NAMES[piece.values.dtype],
            "shape": [piece.values.numel()],
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text
