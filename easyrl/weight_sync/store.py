"""The weights on the trainer's host, and how endpoints reach them (rank 0)."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from easyrl.config import WeightSyncConfig
from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.transfer.access import GROUP, OWNER
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.artifact import (
    Chunk,
    make_artifact_folder,
    remove_artifact,
    write_artifact,
    write_manifest,
    write_share,
)
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from easyrl.inference_client.transfer.keyed_hasher import KeyedHasher
from easyrl.runtime.interfaces import is_loopback, own_address
from easyrl.runtime.machine import url_host
from easyrl.weight_sync.shares import ShareRequest, Shares, read_messages
from easyrl.weight_sync.target import Target

logger = logging.getLogger(__name__)

ACCESS = {"owner": OWNER, "group": GROUP}
NamedWeights = Iterator[tuple[str, Tensor]]


class WeightStore:
    """Writes versions as artefacts and announces them to endpoints. Opens itself on first use."""

    def __init__(self, config: WeightSyncConfig, run_name: str) -> None:
        self._config = config
        self._run = run_name
        self._root = config.directory / f"easyrl-{run_name}"
        self._announcement: Announcement | None = None
        self._servers: dict[str, ChunkServer] = {}  # by the address they listen at
        self._lock = threading.Lock()
        self._has_warned = False  # that nothing can be streamed

    def begin(self, version: str) -> Target:
        """A version that is going to be written."""
        if self._announcement is None:  # removes what a crashed attempt of this run may have left
            self._announcement = Announcement(self._root, self._run, ACCESS[self._config.access])
        return Target(version)

    def write(
        self, target: Target, named_weights: NamedWeights, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Each chunk joins ``target`` on ``loop`` once it is there."""
        assert self._announcement is not None
        directory = self._announcement.root / target.name
        with closing(KeyedHasher(target.nonce)) as keyed:
            chunks = write_artifact(
                named_weights,
                directory,
                target.version,
                self._config.chunk_bytes,
                on_chunk=lambda chunk: loop.call_soon_threadsafe(target.add, chunk),
                memory=self._announcement.memory,
                access=self._announcement.access,
                keyed=keyed if self._config.prove else None,
            )
        reader = ArtifactReader(directory, chunks)
        loop.call_soon_threadsafe(target.complete, reader, keyed.digests)

    def write_shares(self, target: Target, shares: Shares, loop: asyncio.AbstractEventLoop) -> None:
        """As ``write``, of a model that is split: each of its writers writes what it holds."""
        announced = self._announcement
        assert announced is not None
        directory = announced.root / target.name
        memory, access = announced.memory, announced.access
        chunks: list[Chunk] = []

        def add(chunk: Chunk) -> None:
            chunks.append(chunk)
            loop.call_soon_threadsafe(target.add, chunk)

        make_artifact_folder(directory, memory, access)
        prove, chunk_bytes = self._config.prove, self._config.chunk_bytes
        request = ShareRequest(
            str(directory),
            str(announced.root),
            chunk_bytes,
            (access.folder, access.file),
            in_memory=memory is not None,
            nonce=target.nonce.hex() if prove else None,
        )
        try:
            with closing(KeyedHasher(target.nonce)) as keyed:
                write_share(
                    shares.begin_shares(asdict(request)),
                    directory,
                    chunk_bytes,
                    add,
                    memory=memory,
                    access=access,
                    keyed=keyed if prove else None,
                )
            digests = keyed.digests | read_messages(shares.share_messages(), add)
            write_manifest(directory, target.version, chunks, access)
        except BaseException:
            remove_artifact(directory, memory)
            raise
        reader = ArtifactReader(directory, chunks)
        loop.call_soon_threadsafe(target.complete, reader, digests)

    def discard(self, target: Target | None) -> None:
        """Removes a version that nobody serves any more."""
        if target is not None and self._announcement is not None:
            remove_artifact(self._announcement.root / target.name, self._announcement.memory)

    async def init_info(self, url: str) -> dict[str, Any]:
        """What the endpoint at ``url`` is told: the folder, an address to stream from, or both.

        Without a port to serve the stream at, the folder alone is left. Raises
        ``EndpointUnavailable`` if no way leads there, ``ValueError`` without a port if
        ``transport: http`` asks for the stream.
        """
        assert self._announcement is not None
        transport = self._config.transport if self._config.transport in ("file", "http") else "auto"
        stream_url = None
        if transport != "file":
            try:
                stream_url = await asyncio.to_thread(self._stream_url, url)
            except OSError as error:
                problem = (
                    f"weight_sync.port: {self._config.port} cannot be listened at: {error}; free "
                    "it, or set another one, 0 for any"
                )
                if transport == "http":
                    raise ValueError(problem) from None
                transport = "file"
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("%s; endpoints are told of the shared folder only", problem)
        return self._announcement.init_info(transport, stream_url)

    def _stream_url(self, url: str) -> str:
        """Address under which the endpoint at ``url`` reaches a server of the chunks.

        A server listens at one address: that of ``bind_host`` or ``advertise_host``, else where the
        endpoint comes from.
        """
        advertised = self._config.advertise_host
        host = self._config.bind_host or listen_address(advertised, url)
        with self._lock:  # endpoints are told at the same time
            server = self._servers.get(host)
            if server is None or not server.is_alive:
                assert self._announcement is not None
                root, token = self._announcement.root, self._announcement.token
                server = ChunkServer(root, token, host, self._config.port)
                self._servers[host] = server
        return server.url if advertised is None else f"http://{url_host(advertised)}:{server.port}"

    def close(self) -> None:
        """Removes everything from the host."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        if self._announcement is not None:
            self._announcement.remove()
            self._announcement = None


def listen_address(advertised: str | None, url: str) -> str:
    """Where to listen for the endpoint at ``url`` that is told the name ``advertised``.

    The name's address, if it is this machine's (a name's may be the loopback in its own hosts
    file, and another device may forward to here); else that on the way to the endpoint. Raises
    ``EndpointUnavailable``.
    """
    own = None if advertised is None else own_address(advertised)
    if own is not None and (not is_loopback(own) or advertised in (own, "localhost")):
        return own
    return local_address_towards(url)


def local_address_towards(url: str) -> str:
    """The address of this machine from which it reaches the server at ``url``.

    Raises ``EndpointUnavailable`` if its name is unknown or no network leads there.
    """
    parts = urlsplit(url)
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing, only chooses the way
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EndpointUnavailable(url, f"no way leads there: {error}") from None
