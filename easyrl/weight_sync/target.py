"""The target: the weights that every endpoint has to serve, and what proves that one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from easyrl.inference_client.transfer.artifact import Chunk
from easyrl.schema import Completion
from easyrl.weight_sync.canary import Expect, Expected

MOST_CHUNKS = 16  # per request, so that a new version need not wait long for an old one to give up


class WeightStream:
    """The chunks of one version in the order of writing. Belongs to the loop.

    Args:
        name: of the artefact, a single path component.
        version: that endpoints stamp on their tokens once they have proved these weights.
    """

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
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

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

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


@dataclass(frozen=True, slots=True)
class Target:
    """A published version, until the next one: what an endpoint is brought to in mid-batch."""

    weights: WeightStream
    expected: Expected | None  # with a canary: what the trainer said of its samples

    @property
    def version(self) -> str:
        return self.weights.version

    @property
    def expect(self) -> Expect | None:
        """Answers with what the trainer said of other endpoints' canary samples."""
        expected = self.expected
        if expected is None:
            return None

        async def known(url: str, samples: Sequence[Completion]) -> Expected:
            return expected

        return known

    def to_json(self) -> dict[str, Any]:
        """For the other ranks: hashes of the weights, not the weights."""
        return {
            "name": self.weights.name,
            "version": self.version,
            "chunks": [chunk.describe() for chunk in self.weights.chunks],
            "expected": None if self.expected is None else self.expected.to_json(),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Target:
        weights = WeightStream(record["name"], record["version"])
        for chunk in record["chunks"]:
            weights.add(Chunk(**chunk))
        weights.complete()
        expected = record["expected"]
        return cls(weights, None if expected is None else Expected.from_json(expected))
