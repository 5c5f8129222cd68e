"""The target: the weights that every endpoint has to serve, and what proves that one does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from easyrl.inference_client.transfer.artifact import Chunk, weights_digest
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import Slice
from easyrl.schema import APART, Completion
from easyrl.weight_sync.canary import Expected
from easyrl.weight_sync.challenge import NONCE_BYTES, Challenge, shapes_of

MOST_CHUNKS = 16  # per request, so that a new version need not wait long for an old one to give up


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """That a version is an adapter, and of what: the rest of what an endpoint has to serve."""

    name: str  # that requests give; another one for each version, so no cached prefix is another's
    rank: int
    base: Target | None  # the model below it, on this host; None on other ranks than the writer's


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
        self.adapter: ServedAdapter | None = None  # None: the chunks are the whole model
        self.chunks: list[Chunk] = []
        self._digest: str | None = None  # where the writer of the weights has told it
        self.nonce = secrets.token_bytes(NONCE_BYTES)  # of the first question to each endpoint
        self._first = Challenge({}, nonce=self.nonce)
        self._asked: set[str] = set()  # URLs, the first question
        self.is_published = False  # to all; from here on single endpoints are brought to it
        self._complete = False
        self._verifying: asyncio.Future[str | None] | None = None
        self._grown = asyncio.Event()

    @property
    def unproven_stamp(self) -> str:
        """On tokens from the pause before a push until the proof. No request asks for it."""
        return f"{self.version}:updating"

    @property
    def model(self) -> str | None:
        """What requests have to name to be answered with these weights."""
        return None if self.adapter is None else self.adapter.name

    @property
    def base(self) -> Target | None:
        """The model below its adapter, on the host where that was written."""
        return None if self.adapter is None else self.adapter.base

    @property
    def digest(self) -> str:
        """Identity of all that an endpoint has to serve: the model below an adapter, too."""
        if self._digest is not None:
            return self._digest
        if self.adapter is None:
            return weights_digest(self.chunks)
        below = [] if self.base is None else self.base.chunks
        return APART + weights_digest([*below, *self.chunks])

    def add(self, chunk: Chunk) -> None:
        """``chunk`` can be read from now on."""
        self.chunks.append(chunk)
        self._tell()

    def complete(
        self, artifact: ArtifactReader | None = None, digests: Mapping[str, str] | None = None
    ) -> None:
        """No further chunk will come. ``digests``: of whole tensors, keyed with ``nonce``."""
        self._first = Challenge(shapes_of(self.chunks), artifact, nonce=self.nonce)
        self._first.learn(digests or {})
        self._complete = True
        self._tell()

    async def completed(self) -> None:
        """Waits until all chunks are there."""
        while not self._complete:
            await self._grown.wait()

    async def damage(self) -> str | None:
        """What is wrong with this host's copy, once it is whole; None if it is as it was written.

        Many may ask at a time: its bytes are hashed once for them.
        """
        await self.completed()
        if self.base is not None and (damage := await self.base.damage()) is not None:
            return damage
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.ensure_future(asyncio.to_thread(self._first.damage))
        return await asyncio.shield(self._verifying)

    def published(self) -> None:
        """From here on no endpoint is asked with ``nonce``."""
        self.is_published = True
        if self.base is not None:
            self.base.published()

    def challenge(self, url: str) -> Challenge:
        """A question that the endpoint at ``url`` has not been asked; all chunks are there.

        Its digests are formed as the weights are written for the first question, from the host's
        copy for later ones. Another rank than the writer has no copy: it asks the first question
        again, whose answers it knows.
        """
        if self._first.artifact is None:
            return self._first
        if self.is_published or url in self._asked:
            return Challenge(self._first.tensors, self._first.artifact)
        self._asked.add(url)
        return self._first

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
        digests = self._first.digests.items()
        return {
            "tensors": self._first.tensors,
            "nonce": self.nonce.hex(),
            "digests": [[name, *astuple(part), digest] for (name, part), digest in digests],
            "version": self.version,
            "digest": self.digest,
            "adapter": None if self.adapter is None else [self.adapter.name, self.adapter.rank],
            "chunks": [chunk.describe() for chunk in self.chunks],
            "expected": None if self.expected is None else self.expected.to_json(),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Target:
        target = cls(record["version"])
        for chunk in record["chunks"]:
            target.add(Chunk(**chunk))
        target.complete()
        target.nonce = bytes.fromhex(record["nonce"])
        digests = {
            (name, Slice(tuple(starts), tuple(sizes), dtype, flushed)): digest
            for name, starts, sizes, dtype, flushed, digest in record["digests"]
        }
        tensors = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in record["tensors"].items()
        }
        target._first = Challenge(tensors, None, digests, target.nonce)
        target._digest = record["digest"]
        if record["adapter"] is not None:
            name, rank = record["adapter"]
            target.adapter = ServedAdapter(name, rank, base=None)
        if record["expected"] is not None:
            target.expected = Expected.from_json(record["expected"])
        return target
