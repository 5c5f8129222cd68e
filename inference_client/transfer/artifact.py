"""A set of weights as files that the trainer writes and endpoints read (backend ``easyrl``).

An artifact is a directory with ``chunk-00000.safetensors``, ... and, as soon as it is complete,
``manifest.json``: ``{version, chunks: [{file, num_bytes, checksums: {name: blake3}}]}``. A chunk
can be read as soon as it is there under its name, while the trainer writes the next one. Tensors
travel as safetensors (no pickle), and the blake3 hash of each one's bytes travels beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch import Tensor

from easyrl.inference_client.transfer.chunk_file import ChunkFile, bytes_of
from easyrl.inference_client.transfer.reuse import ReusedMemory

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One safetensors file of an artifact."""

    file: str  # name inside the artifact's directory
    checksums: dict[str, str]  # name as ``save_pretrained`` writes it -> blake3, 64 hex digits
    num_bytes: int  # of the tensors in it

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.checksums)

    def describe(self) -> dict[str, Any]:
        """As the receiver wants to be told of it."""
        return {"file": self.file, "num_bytes": self.num_bytes, "checksums": self.checksums}


def weights_digest(chunks: Iterable[Chunk]) -> str:
    """Identity of a set of weights: blake3 over names and hashes of all tensors, 64 hex digits.

    How they are cut into chunks does not matter.
    """
    checksums = {name: value for chunk in chunks for name, value in chunk.checksums.items()}
    digest = blake3()
    for name in sorted(checksums):
        digest.update(f"{name}\0{checksums[name]}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class WeightArtifact:
    """A complete set of weights on disk or in shared memory."""

    version: str
    directory: Path
    chunks: tuple[Chunk, ...]
    memory: ReusedMemory | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """A single path component, below the announced root."""
        return self.directory.name

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def checksums(self) -> dict[str, str]:
        """Of all tensors by name."""
        return {name: value for chunk in self.chunks for name, value in chunk.checksums.items()}

    def update_info(self, chunks: Sequence[Chunk] | None = None) -> dict[str, Any]:
        """Body of one ``/update_weights`` call, with all chunks or those given."""
        chosen = self.chunks if chunks is None else chunks
        return {"artifact": self.name, "chunks": [chunk.describe() for chunk in chosen]}

    def remove(self) -> None:
        """Deletes the files, or leaves them for the next artifact; safe to call twice."""
        _remove(self.directory, self.memory)


def tensor_checksum(tensor: Tensor) -> str:
    """blake3 of the tensor's bytes in row-major order, 64 hex digits."""
    return blake3(bytes_of(tensor).data).hexdigest()


def write_artifact(
    named_weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    version: str,
    chunk_bytes: int,
    on_chunk: Callable[[Chunk], object] | None = None,
    *,
    memory: ReusedMemory | None = None,
) -> WeightArtifact:
    """Writes ``named_weights`` into ``directory``, in the dtypes given.

    A tensor goes straight to its file and needs to be valid only until the next one is asked for;
    no second copy of it is held. A chunk has at most ``chunk_bytes`` or one larger tensor.
    ``on_chunk`` hears of each as soon as it can be read. An artifact of the same name is replaced.
    Raises ``ValueError`` if a name comes twice or a dtype cannot be sent, and ``OSError`` naming
    directory and bytes if it is full; then nothing is left behind.

    Args:
        memory: files of removed artifacts to write over (``ReusedMemory.of(root)``).
    """
    directory = directory.absolute()
    _remove(directory, memory)
    directory.mkdir(parents=True)
    chunks: list[Chunk] = []
    try:
        for chunk in _write_chunks(named_weights, directory, chunk_bytes, memory):
            chunks.append(chunk)
            if on_chunk is not None:
                on_chunk(chunk)
        record = {"version": version, "chunks": [chunk.describe() for chunk in chunks]}
        unfinished = directory / f".{MANIFEST}.part"
        unfinished.write_text(json.dumps(record))
        unfinished.rename(directory / MANIFEST)
    except BaseException:
        _remove(directory, memory)
        raise
    return WeightArtifact(version, directory, tuple(chunks), memory)


def _write_chunks(
    named_weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    chunk_bytes: int,
    memory: ReusedMemory | None,
) -> Iterator[Chunk]:
    """Distributes tensors over chunk files; each file comes when it can be read."""
    names: set[str] = set()
    num_chunks = 0
    file: ChunkFile | None = None
    try:
        for name, weight in named_weights:
            if name in names:
                raise ValueError(f"weight {name!r} was given twice")
            names.add(name)
            if file is not None:
                too_large = file.num_bytes + weight.nbytes > chunk_bytes
                if too_large or not file.has_room_for(name, weight):
                    yield _finished(file)
                    file = None
            if file is None:
                file = ChunkFile(directory / f"chunk-{num_chunks:05d}.safetensors", memory)
                num_chunks += 1
            file.append(name, weight)
        if file is not None:
            yield _finished(file)
            file = None
    finally:
        if file is not None:
            file.discard()


def _finished(file: ChunkFile) -> Chunk:
    file.finish()
    return Chunk(file.path.name, file.checksums, file.num_bytes)


def _remove(directory: Path, memory: ReusedMemory | None) -> None:
    if memory is not None:
        memory.reclaim(directory)
    else:
        shutil.rmtree(directory, ignore_errors=True)
