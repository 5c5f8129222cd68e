"""A set of weights as files on a folder that trainer and endpoints share (backend ``easyrl``).

The trainer writes one artifact per policy version, for instance below ``/dev/shm``; an endpoint
reads it chunk by chunk. Tensors travel as safetensors (no pickle) and each carries the xxh3_64 hash
of its bytes, which the endpoint checks on the way in and can report of what it serves.

An artifact is a directory with ``chunk-00000.safetensors``, … and ``manifest.json``:
``{version, chunks: [{file, names, num_bytes}], checksums: {name: hex}}``. It appears under its name
only when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One safetensors file of an artifact."""

    file: str  # name inside the artifact's directory
    names: tuple[str, ...]
    num_bytes: int  # of the tensors in it


@dataclass(frozen=True, slots=True)
class WeightArtifact:
    """A complete set of weights on disk or in shared memory."""

    version: str
    directory: Path
    chunks: tuple[Chunk, ...]
    checksums: dict[str, str]  # name as ``save_pretrained`` writes it -> xxh3_64, 16 hex digits

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    def update_infos(self) -> list[dict[str, Any]]:
        """The ``update_info`` of each ``/update_weights`` call, in order."""
        return [
            {
                "path": str(self.directory / chunk.file),
                "checksums": {name: self.checksums[name] for name in chunk.names},
            }
            for chunk in self.chunks
        ]

    def remove(self) -> None:
        """Deletes the files; nothing happens if they are gone already."""
        shutil.rmtree(self.directory, ignore_errors=True)


def tensor_checksum(tensor: Tensor) -> str:
    """xxh3_64 of the tensor's bytes in row-major order, 16 hex digits."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return xxhash.xxh3_64_hexdigest(data)


def write_artifact(
    named_weights: Iterator[tuple[str, Tensor]], directory: Path, version: str, chunk_bytes: int
) -> WeightArtifact:
    """Writes ``named_weights`` below ``directory``, in the dtypes given.

    Tensors are copied one at a time (they need to be valid only until the next one is asked for)
    and at most ``chunk_bytes`` of them, or one larger tensor, are held until their file is written.
    An artifact of the same name is replaced. On an error nothing is left behind.
    """
    directory = directory.absolute()
    unfinished = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        chunks, checksums = _write_chunks(named_weights, unfinished, chunk_bytes)
        artifact = WeightArtifact(version, directory, chunks, checksums)
        _write_manifest(artifact, unfinished / MANIFEST)
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return artifact


def load_artifact(directory: Path) -> WeightArtifact:
    """Reads the manifest. Raises ``ValueError`` if ``directory`` is not a complete artifact."""
    directory = directory.absolute()
    manifest = directory / MANIFEST
    try:
        record = json.loads(manifest.read_bytes())
        chunks = tuple(
            Chunk(chunk["file"], tuple(chunk["names"]), chunk["num_bytes"])
            for chunk in record["chunks"]
        )
        return WeightArtifact(record["version"], directory, chunks, record["checksums"])
    except FileNotFoundError:
        raise ValueError(f"{directory}: no complete weight artifact, {MANIFEST} missing") from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{manifest}: not a weight manifest ({error!r})") from None


def read_chunk(path: Path, checksums: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one chunk file, each verified before it is handed out.

    The file must hold exactly the tensors that ``checksums`` names. Raises ``ValueError`` naming
    file and tensor if it does not, if it cannot be read, or if a tensor's bytes have another hash.
    """
    try:
        file = safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from None
    with file as tensors:
        held = set(tensors.keys())
        if missing := sorted(checksums.keys() - held):
            raise ValueError(f"{path}: does not hold tensor {missing[0]!r}")
        if unexpected := sorted(held - checksums.keys()):
            raise ValueError(f"{path}: no checksum was given for tensor {unexpected[0]!r}")
        for name, expected in checksums.items():
            tensor = tensors.get_tensor(name)
            if (actual := tensor_checksum(tensor)) != expected:
                raise ValueError(
                    f"{path}: tensor {name!r} has checksum {actual}, expected {expected}"
                )
            yield name, tensor


def _write_chunks(
    named_weights: Iterator[tuple[str, Tensor]], directory: Path, chunk_bytes: int
) -> tuple[tuple[Chunk, ...], dict[str, str]]:
    chunks: list[Chunk] = []
    checksums: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    pending_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        file = f"chunk-{len(chunks):05d}.safetensors"
        save_file(pending, directory / file)
        chunks.append(Chunk(file, tuple(pending), pending_bytes))
        pending.clear()
        pending_bytes = 0

    for name, weight in named_weights:
        if name in checksums:
            raise ValueError(f"weight {name!r} was given twice")
        if pending and pending_bytes + weight.nbytes > chunk_bytes:
            flush()
        copy = weight.detach().cpu().clone(memory_format=torch.contiguous_format)
        checksums[name] = tensor_checksum(copy)
        pending[name] = copy
        pending_bytes += copy.nbytes
    if pending:
        flush()
    return tuple(chunks), checksums


def _write_manifest(artifact: WeightArtifact, path: Path) -> None:
    record = {
        "version": artifact.version,
        "chunks": [
            {"file": chunk.file, "names": chunk.names, "num_bytes": chunk.num_bytes}
            for chunk in artifact.chunks
        ],
        "checksums": artifact.checksums,
    }
    path.write_text(json.dumps(record))
