"""A split model's weights: each pipeline stage writes what it holds, the head merges the lists.

Consumes: what the head asks for, weights of one stage. Waits for: nothing. Produces: chunks in the
artefact's folder, which all writers see, and what is known of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from easyrl.inference_client.transfer.access import Access
from easyrl.inference_client.transfer.artifact import ReusedMemory, write_share
from easyrl.inference_client.transfer.keyed_hasher import KeyedHasher
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import (
    DTYPE_NAMES,
    DTYPES,
    Chunk,
    Entry,
)

NamedWeights = Iterator[tuple[str, Tensor]]
Say = Callable[[Any], object]  # tells the head something, JSON


@dataclass(frozen=True, slots=True)
class ShareRequest:
    """What the head asks the other writers for."""

    directory: str  # of the artefact
    root: str  # of all artefacts of the run
    chunk_bytes: int
    access: tuple[int, int]  # ``Access``: modes of folders and files
    in_memory: bool  # files of removed artefacts are written over
    nonce: str | None  # hex, of the second hash; None: there is none


class Shares(Protocol):
    """The head's way to the other writers of its model (``GroupLeader``)."""

    def begin_shares(self, request: dict[str, Any]) -> NamedWeights:
        """Has them write; this process's own share. Collective over the ranks of the group."""

    def share_messages(self) -> Iterator[dict[str, Any]]:
        """What they tell of theirs, to the last: ``ShareWriter.write`` says it."""


class ShareWriter:
    """Writes one process's share of each version."""

    def __init__(self) -> None:
        self._memory: dict[str, ReusedMemory] = {}  # by root

    def write(self, writer: int, weights: NamedWeights, request: dict[str, Any], say: Say) -> None:
        """Says ``{"chunk": …}`` of each chunk that can be read, last ``{"digests": …}``, keyed
        hashes by tensor, or ``{"problem": …}``.

        ``writer``: number of this process among the writers.
        """
        wanted = ShareRequest(**request)
        nonce = None if wanted.nonce is None else bytes.fromhex(wanted.nonce)
        with closing(KeyedHasher(nonce or bytes(32))) as keyed:
            try:
                write_share(
                    weights,
                    Path(wanted.directory),
                    wanted.chunk_bytes,
                    lambda chunk: say({"chunk": chunk_json(chunk)}),
                    writer=writer,
                    memory=self._memory_of(wanted),
                    access=Access(*wanted.access),
                    keyed=None if nonce is None else keyed,
                )
            except OSError as error:
                say({"problem": str(error)})
                return
        say({"digests": keyed.digests})

    def _memory_of(self, wanted: ShareRequest) -> ReusedMemory | None:
        if not wanted.in_memory:
            return None
        return self._memory.setdefault(wanted.root, ReusedMemory(Path(wanted.root)))


def chunk_json(chunk: Chunk) -> dict[str, Any]:
    """With what only its writer knows: where its tensors lie."""
    entries = [
        [e.name, DTYPE_NAMES[e.dtype], list(e.shape), e.num_bytes, e.start, e.end]
        for e in chunk.entries
    ]
    return {
        "file": chunk.file,
        "num_bytes": chunk.num_bytes,
        "checksums": dict(chunk.checksums),
        "entries": entries,
    }


def chunk_of(record: dict[str, Any]) -> Chunk:
    """Inverse of ``chunk_json``."""
    entries = tuple(
        Entry(name, DTYPES[dtype], tuple(shape), num_bytes, start, end)
        for name, dtype, shape, num_bytes, start, end in record["entries"]
    )
    return Chunk(record["file"], record["num_bytes"], record["checksums"], entries)


def read_messages(
    messages: Iterator[dict[str, Any]], on_chunk: Callable[[Chunk], object]
) -> dict[str, str]:
    """Keyed hashes of all tensors of the other writers. Raises ``OSError`` with what one met."""
    digests: dict[str, str] = {}
    problem: str | None = None
    for message in messages:
        match message:
            case {"chunk": chunk}:
                on_chunk(chunk_of(chunk))
            case {"digests": theirs}:
                digests |= theirs
            case {"problem": said}:
                problem = problem or said
    if problem is not None:
        raise OSError(problem)
    return digests
