"""The target: the weights that every endpoint has to serve, and what proves that one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from easyrl.inference_client.transfer.artifact import Chunk
from easyrl.schema import Completion
from easyrl.weight_sync.canary import Expected

MOST_CHUNKS = 16  # per request, so that a new version need not wait long for an old one to give up


class Target:
    """A version: the chunks of its weights in the order of writing. Belongs to the loop.

    ``version`` is what endpoints stamp on their tokens once they have proved these weights;
    ``expected``, with a canary, what the trainer has said of its samples: once it is published, an
    endpoint is brought to it in mid-batch without the trainer.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self.name = version.replace(":", "-")  # of the artefact, a single path component
        self.expected: Expected | None = None
        self.chunks: list[Chunk] = []
        self._complete = False
        self._grown = asyncio.Event()

    @property
    def unproven_stamp(self) -> str:
        """On tokens from the pause before a push until the proof. No request asks for it."""
        return f"{self.version}:updating"

    def add(self, chunk: Chunk) -> None:
        """``chunk`` can be read from now on."""
        self.chunks.append(chunk)
        self._tell()

    def complete(self) -> None:
        """No further chunk will come."""
        self._complete = True
        self._tell()

    async def completed(self) -> None:
        """Waits until all chunks are there."""
        while not self._complete:
            await self._grown.wait()

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """All chunks from the first, at each turn those written since; waits for the writer."""
        sent = 0
        while True:
            grown = self._grown
            if batch := self.chunks[sent : sent + MOST_CHUNKS]:
                sent += len(batch)
                yield batch
            elif self._complete:
                return
            else:
                await grown.wait()

    def _tell(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def known(self, url: str, samples: Sequence[Completion]) -> Expected:
        """What the trainer has said of other endpoints' canary samples (``Expect``)."""
        assert self.expected is not None
        return self.expected

    def to_json(self) -> dict[str, Any]:
        """For the other ranks: hashes of the weights, not the weights."""
        return {
            "version": self.version,
            "chunks": [chunk.describe() for chunk in self.chunks],
            "expected": None if self.expected is None else self.expected.to_json(),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Target:
        target = cls(record["version"])
        for chunk in record["chunks"]:
            target.add(Chunk(**chunk))
        target.complete()
        if record["expected"] is not None:
            target.expected = Expected.from_json(record["expected"])
        return target
