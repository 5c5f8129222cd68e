"""Reads tensors of an artifact back from this host's files, without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from easyrl.inference_client.transfer.artifact import HEADER_BYTES, tensor_checksum
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import Chunk
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import map_file


class DamagedArtifact(RuntimeError):
    """This host's copy of the weights is gone, or is not what was written."""


class ArtifactReader:
    """The tensors of ``chunks``, as ``write_artifact`` has put them into ``directory``."""

    def __init__(self, directory: Path, chunks: Sequence[Chunk]) -> None:
        self._directory = directory
        self._chunks = {entry.name: chunk for chunk in chunks for entry in chunk.entries}
        self._entries = {entry.name: entry for chunk in chunks for entry in chunk.entries}

    def read(self, name: str) -> Tensor:
        """The tensor in the file. Raises ``DamagedArtifact`` if the file is gone or too short."""
        chunk, entry = self._chunks[name], self._entries[name]
        path = self._directory / chunk.file
        try:
            data = torch.from_numpy(map_file(path, HEADER_BYTES + chunk.num_bytes))
        except (RuntimeError, OSError) as error:
            raise DamagedArtifact(f"{path}: cannot be read ({error})") from None
        start = HEADER_BYTES + entry.start
        own = data[start : start + entry.num_bytes]
        if start % entry.dtype.itemsize:  # behind a tensor of a smaller dtype
            own = own.clone()
        return own.view(entry.dtype).view(entry.shape)

    def verify(self, name: str) -> None:
        """Raises ``DamagedArtifact`` if the file does not hold what was written."""
        chunk = self._chunks[name]
        if tensor_checksum(self.read(name)) != chunk.checksums[name]:
            path = self._directory / chunk.file
            raise DamagedArtifact(f"{path}: tensor {name!r} was changed after it was written")
