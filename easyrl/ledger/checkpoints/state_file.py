"""One rank's share of the engine's state as a safetensors file, and all shares read back.

Every piece is a range of a flattened tensor; where it starts stands in the file's metadata, in the
form that ``torch.distributed.checkpoint`` reads (``HuggingFaceStorageReader``).
"""

from __future__ import annotations

import errno
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from easyrl.engines.base import StatePiece
from easyrl.runtime.durable_files import fsync

BLOCK_BYTES = 8 * 2**20  # written and hashed at a time, the interpreter free meanwhile
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
SHARDING = "DCP_SHARDING_INFO"


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
    """All ranks' files as one state (``SavedState``), whatever number of ranks wrote it.

    To be closed; files are mapped, so only what is asked for is read.
    """

    def __init__(self, files: Sequence[Path], description: Mapping[str, Any]) -> None:
        self.description = description
        self._opened = ExitStack()
        self._pieces: dict[str, list[tuple[int, int, Any]]] = defaultdict(list)
        for file in files:
            opened = self._opened.enter_context(safe_open(file, framework="pt"))
            starts = json.loads(opened.metadata()[SHARDING])
            for key in opened.keys():  # noqa: SIM118 - not a dict
                (numel,) = opened.get_slice(key).get_shape()
                self._pieces[key].append((starts[key]["saved_offsets"][0], numel, opened))

    def keys(self) -> frozenset[str]:
        """Of all ranks."""
        return frozenset(self._pieces)

    def numel(self, key: str) -> int:
        """Elements of the whole tensor; 0 if there is none of that name."""
        return max((start + numel for start, numel, _ in self._pieces.get(key, ())), default=0)

    def read(self, key: str, start: int, numel: int) -> Tensor:
        """Elements ``[start, start + numel)`` of the flattened tensor, [numel], on the CPU.

        Raises ``ValueError`` if some of them are in no file.
        """
        found = []
        for piece_start, piece_numel, opened in self._pieces.get(key, ()):
            first = max(start, piece_start)
            last = min(start + numel, piece_start + piece_numel)
            if first < last:
                part = opened.get_slice(key)[first - piece_start : last - piece_start]
                found.append((first, part))
        found.sort(key=lambda item: item[0])
        position = start
        for first, part in found:
            if first != position:
                break
            position += len(part)
        if position != start + numel:
            raise ValueError(f"the checkpoint lacks elements {position} and on of {key}")
        return torch.cat([part for _, part in found]) if found else torch.empty(0)

    def close(self) -> None:
        self._opened.close()


def _header(pieces: Sequence[StatePiece]) -> bytes:
    """Length and JSON of the safetensors format, padded to 8 bytes."""
    starts = {piece.key: {"saved_offsets": [piece.start]} for piece in pieces}
    assert len(starts) == len(pieces), "a key comes twice"
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", SHARDING: json.dumps(starts)}}
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
