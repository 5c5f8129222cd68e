"""One safetensors file while it is being written: one copy, hashed on its way."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from easyrl.inference_client.transfer.reuse import ReusedMemory
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPES
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import Bytes

HEADER_BYTES = 2**16  # in front of the tensors, padded with spaces; longer only for one long name
BLOCK_BYTES = 2**19  # copied and hashed at a time: stays in the processor's cache
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ChunkFile:
    """Takes tensors, then appears under its name.

    The header's room is left free in front, so that a tensor is written as soon as it comes.

    Args:
        path: of the finished file; it does not exist before ``finish``.
        memory: where a file to write over may be had.
    """

    def __init__(self, path: Path, memory: ReusedMemory | None) -> None:
        self.checksums: dict[str, str] = {}
        self.num_bytes = 0  # of the tensors
        self.path = path
        self._unfinished = path.with_name(f".{path.name}.part")
        self._memory = memory
        self._header: dict[str, object] = {}
        self._header_bytes = 8  # an upper bound, with the length in front
        self._descriptor: int | None = None
        self._mapped = memory.take(path.name, self._unfinished) if memory is not None else None
        if self._mapped is not None and len(self._mapped) < HEADER_BYTES:
            self._leave_mapped()
        if self._mapped is None and self._descriptor is None:
            self._open()

    def has_room_for(self, name: str, weight: Tensor) -> bool:
        """Whether the header can take one more entry."""
        return self._header_bytes + len(_json(_entry(name, weight, 2**50))) <= HEADER_BYTES

    def append(self, name: str, weight: Tensor) -> None:
        """Copies and hashes one tensor.

        Raises ``ValueError`` for a dtype that cannot be sent, ``OSError`` if the disk is full.
        """
        if weight.dtype not in DTYPE_NAMES:
            raise ValueError(f"weight {name!r}: {weight.dtype} cannot be sent")
        if not self.has_room_for(name, weight):
            raise ValueError(f"weight {name[:100]!r}...: a name of {len(name)} letters is too long")
        entry = _entry(name, weight, self.num_bytes)
        self._header |= entry
        self._header_bytes += len(_json(entry))
        source = bytes_of(weight)
        digest = blake3()
        for start in range(0, len(source), BLOCK_BYTES):
            block = source[start : start + BLOCK_BYTES]
            self._put(block)
            digest.update(block.data)
        self.checksums[name] = digest.hexdigest()

    def finish(self) -> None:
        """The file is complete and can be read. Raises ``OSError`` if the disk is full."""
        if self._mapped is not None and len(self._mapped) != HEADER_BYTES + self.num_bytes:
            self._leave_mapped()
        text = _json(self._header).ljust(HEADER_BYTES - 8)
        header = (HEADER_BYTES - 8).to_bytes(8, "little") + text
        if self._mapped is not None:
            self._mapped[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        else:
            assert self._descriptor is not None
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self._write(np.frombuffer(header, np.uint8))
        self._close()
        self._unfinished.rename(self.path)

    def discard(self) -> None:
        """Gives up what was written."""
        self._close()
        if self._memory is not None:
            self._memory.forget(self._unfinished)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _put(self, block: Bytes) -> None:
        start = HEADER_BYTES + self.num_bytes
        end = start + len(block)
        if self._mapped is not None and end > len(self._mapped):
            self._leave_mapped()
        if self._mapped is not None:
            np.copyto(self._mapped[start:end], block)
        else:
            self._write(block)
        self.num_bytes += len(block)

    def _leave_mapped(self) -> None:
        """The old file's size does not fit (another model): goes on in a fresh one."""
        assert self._mapped is not None and self._memory is not None
        written = self._mapped[HEADER_BYTES : HEADER_BYTES + self.num_bytes]
        self._mapped = None
        self._memory.forget(self._unfinished)
        self._open()
        self._write(written)

    def _open(self) -> None:
        self._descriptor = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.lseek(self._descriptor, HEADER_BYTES, os.SEEK_SET)

    def _write(self, block: Bytes) -> None:
        assert self._descriptor is not None
        while len(block):
            try:
                block = block[os.write(self._descriptor, block.data) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                message = f"no space for {len(block)} more bytes of weights ({error.strerror})"
                raise OSError(error.errno, message, str(self.path.parent)) from None


def _entry(name: str, weight: Tensor, start: int) -> dict[str, object]:
    """Of the header, for a tensor whose bytes begin at ``start``."""
    record = {
        "dtype": DTYPE_NAMES[weight.dtype],
        "shape": list(weight.shape),
        "data_offsets": [start, start + weight.nbytes],
    }
    return {name: record}


def _json(header: dict[str, object]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def bytes_of(weight: Tensor) -> Bytes:
    """Row-major bytes on the CPU; those of the tensor itself where they lie there like that."""
    flat = weight.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()
