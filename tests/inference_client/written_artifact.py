"""An artifact as tests hold it: what ``write_artifact`` wrote, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from easyrl.inference_client.transfer import artifact
from easyrl.inference_client.transfer.artifact import Chunk, ReusedMemory
from easyrl.inference_client.transfer.keyed_hasher import KeyedHasher


@dataclass(frozen=True)
class WeightArtifact:
    version: str
    directory: Path
    chunks: tuple[Chunk, ...]
    memory: ReusedMemory | None = None

    @property
    def name(self) -> str:
        """A single path component, below the announced root."""
        return self.directory.name

    @property
    def checksums(self) -> dict[str, str]:
        """Of all tensors by name."""
        return {name: value for chunk in self.chunks for name, value in chunk.checksums.items()}

    def update_info(self, chunks: Sequence[Chunk] | None = None) -> dict[str, Any]:
        """Body of one ``/update_weights`` call, with all chunks or those given."""
        chosen = self.chunks if chunks is None else chunks
        return {"artifact": self.name, "chunks": [chunk.describe() for chunk in chosen]}

    def remove(self) -> None:
        artifact.remove_artifact(self.directory, self.memory)


def write_artifact(
    named_weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    version: str,
    chunk_bytes: int,
    on_chunk: Callable[[Chunk], object] | None = None,
    *,
    memory: ReusedMemory | None = None,
    keyed: KeyedHasher | None = None,
) -> WeightArtifact:
    chunks = artifact.write_artifact(
        named_weights, directory, version, chunk_bytes, on_chunk, memory=memory, keyed=keyed
    )
    return WeightArtifact(version, directory, tuple(chunks), memory)
