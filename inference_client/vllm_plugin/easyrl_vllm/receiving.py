"""Weights on their way in: from shared memory, a shared disk or HTTP to CPU tensors.

An artifact is a directory of safetensors files, its chunks. What may be read, and how large it is,
is what the trainer announced: the root or URL at the start, names and hashes with each update. One
thread reads and hashes ahead while the caller loads what is verified already. What comes out of
shared memory and is going to be proved before it is used need not be hashed here: the proof finds
the same wrong bit, after the last copy of it was made. Used by the vLLM plugin and by the embedded
server; needs the standard library, torch, numpy and blake3 only.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from .chunk_format import Chunk, Entry, read_header
from .mapping import Bytes
from .reading import ChunkStream, ConnectionDropped, FileSource, HttpSource, check_component

BLOCK_BYTES = 2**19  # read and hashed at a time: stays in the processor's cache
HANDOVER_BYTES = 4 * 2**20  # verified tensors go to the caller in heaps of about this size
ALIGNMENT = 64  # bytes, of each tensor in the buffer
NUM_ATTEMPTS = 4  # per chunk, when a connection drops
RETRY_AFTER_S = 0.2

Target = Callable[[str, torch.dtype, tuple[int, ...]], Tensor | None]
Verified = list[tuple[str, Tensor]]
Outbox = queue.SimpleQueue["Verified | Exception | None"]  # None: the chunk is complete


class WeightReceiver:
    """Reads the chunks that a trainer announces.

    ``init_info``: ``{"run": str, "token": str, "root": str | null, "url": str | null}``. The root
    is used where its ``announcement`` holds the hash of the token, which tells that trainer and
    receiver see the same directory; else the URL. ``pin_memory``: page-locked buffers, for copies
    to a GPU. Raises ``ValueError`` if neither can be used, naming both and why.

    Attributes:
        provable: names of the tensors whose every bit this process can show, as its last proof to
            this trainer did; none before that.
    """

    def __init__(self, init_info: Mapping[str, Any], *, pin_memory: bool = False) -> None:
        token = _text(init_info, "token")
        self.run = _text(init_info, "run")
        self._source, self.transport = _choose(token, init_info.get("root"), init_info.get("url"))
        self._buffers = (_Buffer(pin_memory), _Buffer(pin_memory))
        self.provable: Set[str] = frozenset()
        self._closed = False
        self._reader = ThreadPoolExecutor(1, "easyrl-weights")

    def tensors(
        self,
        artifact: str,
        chunks: Sequence[Mapping[str, Any]],
        target: Target | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and verified CPU tensor of every weight in ``chunks``, chunk after chunk.

        ``chunks``: as ``Chunk.describe`` says. Where a proof follows, those of ``provable`` that
        come out of shared memory are not hashed here: it finds what is wrong with them. A tensor
        is valid until the next one is asked for after its chunk has ended: two buffers, as large
        as the largest chunk, take turns. ``target(name, dtype, shape)`` may give a contiguous CPU
        tensor to place a weight in instead, which is handed out when it is verified; it is called
        in the reading thread and may raise ``ValueError``. Raises ``ValueError``, naming file and
        tensor, for a name that leaves the artifact, a file that cannot be read or holds other
        tensors or more bytes than announced, and a wrong hash.
        """
        check_component("artifact", artifact)
        announced = [Chunk.parse(chunk) for chunk in chunks]
        return self._tensors(artifact, announced, target)

    def close(self) -> None:
        """Ends the connection and the thread; memory goes with the receiver."""
        self._closed = True
        self._source.close()
        self._reader.shutdown(cancel_futures=True)

    def _tensors(
        self, artifact: str, chunks: list[Chunk], target: Target | None
    ) -> Iterator[tuple[str, Tensor]]:
        outboxes = [Outbox() for _ in chunks]
        running: list[Future[None]] = []

        def start(index: int) -> None:
            if index < len(chunks):
                chunk, buffer = chunks[index], self._buffers[index % 2]
                where = self._source.where(artifact, chunk.file)
                skips = chunk.proof_follows and self._source.in_memory
                unchecked = self.provable if skips else frozenset()
                reading = _ChunkReading(chunk, buffer, target, unchecked, outboxes[index], where)
                running.append(self._reader.submit(self._read, artifact, reading))

        start(0)
        try:
            for index, outbox in enumerate(outboxes):
                start(index + 1)  # its buffer is free: the caller is through with index - 1
                while (item := outbox.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield from item
        finally:  # the caller may stop early; what is being read ends before anything else begins
            for future in running:
                future.cancel()

    def _read(self, artifact: str, reading: _ChunkReading) -> None:
        """In the thread: a whole chunk, again from its start if the connection drops."""
        try:
            for attempt in range(1, NUM_ATTEMPTS + 1):
                try:
                    with closing(self._source.open(artifact, reading.chunk.file)) as stream:
                        reading.run(stream)
                    break
                except ConnectionDropped as error:
                    if attempt == NUM_ATTEMPTS or self._closed:
                        raise ValueError(f"{error} (attempt {attempt})") from None
                    time.sleep(RETRY_AFTER_S * (attempt - 1))  # one that was idle drops at once
            reading.outbox.put(None)
        except Exception as error:  # for the caller, who waits for it
            reading.outbox.put(error)


class _Buffer:
    """Memory for one chunk, kept from update to update and replaced by a larger one as needed."""

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._data = torch.empty(0, dtype=torch.uint8)

    def of(self, num_bytes: int) -> Tensor:
        """uint8 [at least num_bytes]."""
        if len(self._data) < num_bytes:
            self._data = torch.empty(0, dtype=torch.uint8)  # freed before the new one is there
            self._data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        return self._data


@dataclass
class _ChunkReading:
    """One chunk, from its header to verified tensors in the caller's outbox."""

    chunk: Chunk
    buffer: _Buffer
    target: Target | None
    unchecked: Set[str]  # names
    outbox: Outbox
    where: str
    num_read: int = 0  # tensors that the caller may be using: another attempt skips them

    def run(self, stream: ChunkStream) -> None:
        """Raises ``ValueError``, or ``ConnectionDropped`` if it may be called once more."""
        entries = read_header(stream, self.chunk, self.where)
        heap: Verified = []
        heap_bytes = 0
        try:
            for index, (entry, place) in enumerate(self._places(entries)):
                if index < self.num_read:
                    _skip(stream, entry.num_bytes)
                    continue
                if entry.name in self.unchecked:
                    stream.fill(_bytes_of(place))
                else:
                    self._read_verified(stream, entry, _bytes_of(place))
                self.num_read += 1
                heap.append((entry.name, place))
                heap_bytes += entry.num_bytes
                if heap_bytes >= HANDOVER_BYTES:
                    self.outbox.put(heap)
                    heap, heap_bytes = [], 0
        finally:
            self.outbox.put(heap)

    def _places(self, entries: list[Entry]) -> Iterator[tuple[Entry, Tensor]]:
        """A tensor of each entry's dtype and shape to read it into."""
        room = sum(-(-entry.num_bytes // ALIGNMENT) * ALIGNMENT for entry in entries)
        data: Tensor | None = None
        start = 0
        for entry in entries:
            place = None
            if self.target is not None:
                place = self.target(entry.name, entry.dtype, entry.shape)
            if place is None:
                data = self.buffer.of(room) if data is None else data
                flat = data[start : start + entry.num_bytes].view(entry.dtype)
                place = flat.view(entry.shape)
                start += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
            yield entry, place

    def _read_verified(self, stream: ChunkStream, entry: Entry, target: Bytes) -> None:
        digest = blake3()
        for start in range(0, len(target), BLOCK_BYTES):
            block = target[start : start + BLOCK_BYTES]
            stream.fill(block)
            digest.update(block.data)
        actual, expected = digest.hexdigest(), self.chunk.checksums[entry.name]
        if actual != expected:
            raise ValueError(
                f"{self.where}: tensor {entry.name!r} has hash {actual}, announced was {expected}"
            )


def _choose(token: str, root: object, url: object) -> tuple[FileSource | HttpSource, str]:
    """Source and name of the transport."""
    problems = []
    for transport, place, kind in (("file", root, FileSource), ("http", url, HttpSource)):
        if place is None:
            continue
        if not isinstance(place, str):
            raise ValueError(f"init_info: {place!r} is not a path or URL")
        try:
            return kind(place, token), transport
        except ValueError as error:
            problems.append(str(error))
    if not problems:
        problems = ["neither root nor url was announced"]
    raise ValueError(f"the trainer's weights cannot be reached: {'; '.join(problems)}")


def _text(init_info: Mapping[str, Any], key: str) -> str:
    value = init_info.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"init_info: {key} is missing; this backend is for EasyRL's trainer")
    return value


def _bytes_of(tensor: Tensor) -> Bytes:
    """The tensor's memory; it is contiguous and on the CPU."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _skip(stream: ChunkStream, num_bytes: int) -> None:
    scratch = np.empty(min(num_bytes, BLOCK_BYTES), np.uint8)
    for start in range(0, num_bytes, BLOCK_BYTES):
        stream.fill(scratch[: num_bytes - start])
