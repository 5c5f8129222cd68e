"""A set of weights as files that the trainer writes and endpoints read (backend ``easyrl``).

An artifact is a directory with ``chunk-00000.safetensors``, ... and, as soon as it is complete,
``manifest.json``: ``{version, chunks: [{file, num_bytes, checksums: {name: blake3}}]}``. A chunk
can be read as soon as it is there under its name, while the trainer writes the next one. Tensors
travel as safetensors (no pickle), and the blake3 hash of each one's bytes travels beside them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from easyrl.inference_client.transfer.access import Access
from easyrl.inference_client.transfer.keyed_hasher import KeyedHasher
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPE_NAMES, Chunk, Entry
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import Bytes, map_file

MANIFEST = "manifest.json"
FREE = ".free"  # folder in the root, of files that wait for their next use
HEADER_BYTES = 2**16  # in front of the tensors, padded with spaces; longer only for one long name
CHUNKS_PER_WRITER = 10**5
BLOCK_BYTES = 2**19  # copied and hashed at a time: stays in the processor's cache


def weights_digest(chunks: Iterable[Chunk]) -> str:
    """Identity of a set of weights: blake3 over names and hashes of all tensors, 64 hex digits.

    How they are cut into chunks does not matter.
    """
    checksums = {name: value for chunk in chunks for name, value in chunk.checksums.items()}
    digest = blake3()
    for name in sorted(checksums):
        digest.update(f"{name}\0{checksums[name]}\n".encode())
    return digest.hexdigest()


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
    access: Access | None = None,
    keyed: KeyedHasher | None = None,
) -> list[Chunk]:
    """Writes ``named_weights`` into ``directory``, in the dtypes given.

    A tensor goes straight to its file and needs to be valid only until the next one is asked for;
    no second copy of it is held. A chunk has at most ``chunk_bytes`` or one larger tensor.
    ``on_chunk`` hears of each as soon as it can be read. An artifact of the same name is replaced.
    Raises ``ValueError`` if a name comes twice or a dtype cannot be sent, and ``OSError`` naming
    directory and bytes if it is full; then nothing is left behind. ``memory``: files of removed
    artifacts to write over. ``access``: who may read it; None: as the umask says. ``keyed``: hashes
    each tensor a second time, meanwhile.
    """
    directory = directory.absolute()
    make_artifact_folder(directory, memory, access)
    try:
        chunks = write_share(
            named_weights,
            directory,
            chunk_bytes,
            on_chunk,
            memory=memory,
            access=access,
            keyed=keyed,
        )
        write_manifest(directory, version, chunks, access)
    except BaseException:
        remove_artifact(directory, memory)
        raise
    return chunks


def make_artifact_folder(
    directory: Path, memory: ReusedMemory | None, access: Access | None
) -> None:
    """Of an artifact that is going to be written; one of the same name is removed."""
    remove_artifact(directory, memory)
    directory.mkdir(parents=True)
    if access is not None:
        directory.chmod(access.folder)


def write_share(
    named_weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    chunk_bytes: int,
    on_chunk: Callable[[Chunk], object] | None = None,
    *,
    writer: int = 0,
    memory: ReusedMemory | None = None,
    access: Access | None = None,
    keyed: KeyedHasher | None = None,
) -> list[Chunk]:
    """What one of the processes that share a model writes into the artifact's folder.

    ``writer``: its number, by which its files are unlike any other's; else as ``write_artifact``.
    """
    chunks: list[Chunk] = []
    first = writer * CHUNKS_PER_WRITER
    for chunk in _write_chunks(named_weights, directory, chunk_bytes, memory, keyed, first):
        assert len(chunks) < CHUNKS_PER_WRITER
        chunks.append(chunk)
        if access is not None:
            (directory / chunk.file).chmod(access.file)
        if on_chunk is not None:
            on_chunk(chunk)
    return chunks


def write_manifest(
    directory: Path, version: str, chunks: Iterable[Chunk], access: Access | None
) -> None:
    """The artifact is complete. Raises ``ValueError`` if two of its chunks have one tensor."""
    chunks = list(chunks)
    names = [entry.name for chunk in chunks for entry in chunk.entries]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"weight {twice[0]!r} was written twice")
    record = {"version": version, "chunks": [chunk.describe() for chunk in chunks]}
    unfinished = directory / f".{MANIFEST}.part"
    unfinished.write_text(json.dumps(record))
    if access is not None:
        unfinished.chmod(access.file)
    unfinished.rename(directory / MANIFEST)


def _write_chunks(
    named_weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    chunk_bytes: int,
    memory: ReusedMemory | None,
    keyed: KeyedHasher | None,
    number: int,
) -> Iterator[Chunk]:
    """Distributes tensors over chunk files, numbered from ``number``; each comes when it can be
    read."""
    names: set[str] = set()
    file: ChunkFile | None = None
    try:
        for name, weight in named_weights:
            if name in names:
                raise ValueError(f"weight {name!r} was given twice")
            names.add(name)
            if file is not None:
                too_large = file.num_bytes + weight.nbytes > chunk_bytes
                if too_large or not file.has_room_for(name, weight):
                    yield file.finish()
                    file = None
            if file is None:
                file = ChunkFile(directory / f"chunk-{number:05d}.safetensors", memory)
                number += 1
            file.append(name, weight, keyed)
        if file is not None:
            yield file.finish()
            file = None
    finally:
        if file is not None:
            file.discard()


def remove_artifact(directory: Path, memory: ReusedMemory | None) -> None:
    """Deletes the files, or leaves them for the next artifact; safe to call twice."""
    if memory is not None:
        memory.reclaim(directory)
    else:
        shutil.rmtree(directory, ignore_errors=True)


class ReusedMemory:
    """Chunk files of removed artifacts below ``root``, in shared memory, kept for the next ones.

    Taking fresh pages from the system costs more than twice what writing into known ones does, and
    a receiver that has such a file mapped reads it at the speed of plain memory. At most one file
    of each name is kept, so that no more than one artifact's size lies idle.
    """

    def __init__(self, root: Path) -> None:
        self._free = root / FREE
        self._mapped: dict[int, Bytes] = {}  # by inode
        self._lock = threading.RLock()

    def take(self, file: str, target: Path) -> Bytes | None:
        """Moves a freed file of that name to ``target``; its bytes, to be overwritten."""
        with self._lock:
            try:
                (self._free / file).rename(target)
            except FileNotFoundError:
                return None
            status = target.stat()
            memory = self._mapped.get(status.st_ino)
            if memory is not None and len(memory) != status.st_size:
                self.forget(target)  # cut by somebody: writing behind its end would be a SIGBUS
                return None
            if memory is None:
                memory = map_file(target, status.st_size, writable=True)
                self._mapped[status.st_ino] = memory
            return memory

    def forget(self, path: Path) -> None:
        """Deletes ``path``, if it is there."""
        with self._lock:
            if path.exists():
                self._mapped.pop(path.stat().st_ino, None)
                path.unlink()

    def reclaim(self, directory: Path) -> None:
        """Takes an artifact's chunk files and deletes the rest of it."""
        with self._lock:
            if not directory.is_dir():
                return
            self._free.mkdir(0o750, exist_ok=True)
            for path in directory.glob("chunk-*"):
                self.forget(self._free / path.name)
                path.rename(self._free / path.name)
            shutil.rmtree(directory, ignore_errors=True)


class ChunkFile:
    """One file of an artifact: takes tensors, copied once, then appears under its name.

    The header's room is left free in front, so that a tensor is written as soon as it comes.

    Args:
        path: of the finished file; it does not exist before ``finish``.
        memory: where a file to write over may be had.
    """

    def __init__(self, path: Path, memory: ReusedMemory | None) -> None:
        self._checksums: dict[str, str] = {}
        self._entries: list[Entry] = []
        self.num_bytes = 0  # of the tensors
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.part")
        self._memory = memory
        self._header: dict[str, object] = {}
        self._header_bytes = 8  # an upper bound, with the length in front
        self._descriptor: int | None = None
        self._mapped = memory.take(path.name, self._unfinished) if memory is not None else None
        if self._mapped is None:
            self._open()
        elif len(self._mapped) < HEADER_BYTES:
            self._leave_mapped()

    def has_room_for(self, name: str, weight: Tensor) -> bool:
        """Whether the header can take one more entry."""
        return self._header_bytes + len(_json(_entry(name, weight, 2**50))) <= HEADER_BYTES

    def append(self, name: str, weight: Tensor, keyed: KeyedHasher | None = None) -> None:
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
        start, shape = self.num_bytes, tuple(weight.shape)
        end = start + len(source)
        self._entries.append(Entry(name, weight.dtype, shape, len(source), start, end))
        digest = blake3()
        with nullcontext() if keyed is None else keyed.beside(name, source):
            for first in range(0, len(source), BLOCK_BYTES):
                digest.update(self._put(source[first : first + BLOCK_BYTES]).data)
        self._checksums[name] = digest.hexdigest()

    def finish(self) -> Chunk:
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
        self._unfinished.rename(self._path)
        return Chunk(self._path.name, self.num_bytes, self._checksums, tuple(self._entries))

    def discard(self) -> None:
        """Gives up what was written."""
        self._close()
        if self._memory is not None:
            self._memory.forget(self._unfinished)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _put(self, block: Bytes) -> Bytes:
        """Copies ``block``; where memory holds the copy that is what comes back.

        Its hash is of the copy then, and the keyed one of the source: an endpoint that shows the
        latter serves what both are of, so that nobody needs to hash the bytes on their way.
        """
        start = HEADER_BYTES + self.num_bytes
        end = start + len(block)
        if self._mapped is not None and end > len(self._mapped):
            self._leave_mapped()
        self.num_bytes += len(block)
        if self._mapped is None:
            self._write(block)
            return block
        written = self._mapped[start:end]
        np.copyto(written, block)
        return written

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
                raise OSError(error.errno, message, str(self._path.parent)) from None


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
