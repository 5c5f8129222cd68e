"""The trainer's side of a weight update, as far as the contract needs one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from tests.inference_client.contract.conftest import Server
from tests.inference_client.contract.served_models import contract_model, named_weights
from tests.inference_client.written_artifact import WeightArtifact, write_artifact

CHUNK_BYTES = 20_000  # several chunks, some tensors larger than one
Transport = Literal["file", "http"]


class Sender:
    """Writes artifacts of ``Server``-like models and pushes them; every artifact is a new one."""

    def __init__(
        self, announcement: Announcement, transport: Transport, url: str | None = None
    ) -> None:
        self.announcement = announcement
        self.transport = transport
        self.init_info = announcement.init_info(transport, url)
        self._count = itertools.count(1)

    async def announce(self, client: EndpointClient) -> None:
        await client.init_weight_transfer(self.init_info)

    def write(
        self, tied: bool, seed: int, changes: Mapping[str, Tensor] | None = None
    ) -> WeightArtifact:
        """The model of ``seed`` as an artifact; ``changes`` replace or add weights."""
        number = next(self._count)
        weights = dict(named_weights(contract_model(tied, seed))) | dict(changes or {})
        directory = self.announcement.root / f"artifact-{number}"
        return write_artifact(weights.items(), directory, f"contract:0:{number}", CHUNK_BYTES)

    async def push(self, server: Server, client: EndpointClient, seed: int) -> WeightArtifact:
        """A whole update, as the trainer does it: paused, chunk by chunk, caches reset."""
        artifact = self.write(server.tied, seed)
        await client.pause("wait")
        try:
            await self.send(client, artifact)
            assert await client.reset_prefix_cache()
        finally:
            await client.resume()
        server.model = contract_model(server.tied, seed)
        return artifact

    async def send(self, client: EndpointClient, artifact: WeightArtifact) -> None:
        """Start, every chunk, finish."""
        await client.start_weight_update()
        for chunk in artifact.chunks:
            await client.update_weights(artifact.update_info([chunk]))
        await client.finish_weight_update(artifact.version)


@contextmanager
def open_sender(root: Path, transport: Transport) -> Iterator[Sender]:
    """A sender below ``root``; over HTTP with a server process for its files."""
    announcement = Announcement(root, "contract")
    try:
        if transport == "file":
            yield Sender(announcement, transport)
            return
        with closing(ChunkServer(announcement.root, announcement.token, "127.0.0.1", 0)) as chunks:
            yield Sender(announcement, transport, chunks.url)
    finally:
        announcement.remove()


def altered(info: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """``info`` of one chunk with ``artifact`` or the chunk's keys changed."""
    (chunk,) = info["chunks"]
    artifact = changes.pop("artifact", info["artifact"])
    return {"artifact": artifact, "chunks": [chunk | changes]}
