"""Where the chunk files of an artifact are read from: a directory that is shared, or HTTP.

Names come from a request that anyone who reaches the server's port can send, so that a name is one
component of a path, links are not followed, and neither are redirects.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from blake3 import blake3

from .mapping import Bytes, MappedFiles, is_memory

ANNOUNCEMENT = "announcement"  # file in the root that holds the hash of the token
TIMEOUT_S = 60  # without a byte from the trainer


class ConnectionDropped(Exception):
    """The trainer's server went away in the middle; another attempt may succeed."""


class ChunkStream:
    """One chunk file, from its first byte to its last; to be closed."""

    size: int  # bytes of the whole file

    def fill(self, target: Bytes) -> None:
        """Reads exactly as many bytes as ``target`` holds.

        Raises ``ValueError`` or ``ConnectionDropped``.
        """
        while len(target):
            target = target[self._read_into(target) :]

    def _read_into(self, target: Bytes) -> int:
        """Reads at least one byte; how many."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives up what it holds."""


def check_component(kind: str, name: object) -> str:
    """``name`` if it is one component of a path. Raises ``ValueError`` naming ``kind``."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"{kind}: {name!r} must be a plain name, without a folder")
    return name


# ---- files -------------------------------------------------------------------------------------


class FileSource:
    """Artifacts below ``root``.

    In shared memory the trainer writes new versions into the files of old ones, which are mapped
    when they are met again. Raises ``ValueError`` if it is not where ``token``'s holder writes.
    """

    def __init__(self, root: str, token: str) -> None:
        self._root = Path(root)
        try:
            announced = (self._root / ANNOUNCEMENT).read_bytes()
        except PermissionError as error:
            raise ValueError(
                f"root {root}: not readable for this server's Unix user ({error.strerror}); run it "
                "as the trainer's, or set weight_sync.access=group and give both the folder's "
                "group, or send weights by weight_sync.transport=http (auto does)"
            ) from None
        except OSError as error:
            raise ValueError(f"root {root}: not readable here ({error.strerror})") from None
        expected = blake3(token.encode()).hexdigest().encode()
        if not hmac.compare_digest(announced.strip(), expected):
            raise ValueError(f"root {root}: announced with another token; is it another machine's?")
        self.in_memory = is_memory(self._root)
        self._mapped = MappedFiles(self._root) if self.in_memory else None

    def where(self, artifact: str, file: str) -> str:
        return str(self._root / artifact / file)

    def open(self, artifact: str, file: str) -> ChunkStream:
        where = self.where(artifact, file)
        descriptors: list[int] = []
        try:
            descriptors.append(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY))
            # each component from its folder's descriptor: nothing can be swapped in between
            flags = os.O_RDONLY | os.O_NOFOLLOW
            folder = os.open(artifact, flags | os.O_DIRECTORY, dir_fd=descriptors[-1])
            descriptors.append(folder)
            # a pipe of that name must not hold us up
            opened = os.open(file, flags | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            raise ValueError(f"{where}: cannot be read ({error.strerror})") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        stream = FileStream(opened, where)
        if self._mapped is not None and (memory := self._mapped.memory_of(opened)) is not None:
            stream.close()
            return MemoryStream(memory)
        return stream

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()


class FileStream(ChunkStream):
    """An open chunk file; owns ``descriptor``."""

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor = descriptor
        self._where = where
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ValueError(f"{where}: is not a regular file")
        self.size = status.st_size

    def _read_into(self, target: Bytes) -> int:
        count = os.readv(self._descriptor, [target.data])
        if count == 0:
            raise ValueError(f"{self._where}: ends early; is it still being written?")
        return count

    def close(self) -> None:
        os.close(self._descriptor)


class MemoryStream(ChunkStream):
    """A chunk file that is mapped."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._position = 0
        self.size = len(memory)

    def _read_into(self, target: Bytes) -> int:
        end = self._position + len(target)
        np.copyto(target, self._memory[self._position : end])
        self._position = end
        return len(target)


# ---- HTTP --------------------------------------------------------------------------------------


class HttpSource:
    """Artifacts below ``url``, for the holder of ``token``; one connection, kept open.

    Raises ``ValueError`` if nothing answers there.
    """

    in_memory = False

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url}: must begin with http:// or https:// and name a host")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        self._path = parts.path
        self._headers = {"Authorization": f"Bearer {token}"}
        try:
            response = self._get("/health", {})
            response.read(1024)
            status = response.status
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ValueError(f"url {url}: does not answer ({error})") from None
        if status != 200:
            self.close()
            raise ValueError(f"url {url}: /health answers status {status}, it is another server")

    def where(self, artifact: str, file: str) -> str:
        return f"{self._url}/{quote(artifact)}/{quote(file)}"

    def open(self, artifact: str, file: str) -> HttpStream:
        where = self.where(artifact, file)
        try:
            response = self._get(f"/{quote(artifact)}/{quote(file)}", self._headers)
            if response.status != 200:
                text = response.read(300).decode(errors="replace").strip()
                self._connection.close()
                raise ValueError(f"{where}: status {response.status}, expected 200 ({text})")
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens it again
            raise ConnectionDropped(f"{where}: {error!r}") from None
        return HttpStream(self._connection, response, where)

    def close(self) -> None:
        if (connected := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for bytes
        self._connection.close()

    def _get(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        if self._connection.sock is None:
            self._connection.connect()
            connected: Any = self._connection.sock
            # the kernel's own limit: with Python's, the socket is polled before every read
            connected.settimeout(None)
            limit = struct.pack("ll", TIMEOUT_S, 0)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._connection.request("GET", self._path + path, headers=headers)
        return self._connection.getresponse()


class HttpStream(ChunkStream):
    """The body of one answer."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, where: str
    ) -> None:
        if response.length is None:
            connection.close()
            raise ValueError(f"{where}: the answer has no Content-Length")
        self.size = response.length
        self._connection = connection
        self._response = response
        self._where = where

    def _read_into(self, target: Bytes) -> int:
        problem = "the connection ended or hangs"
        try:
            if count := self._response.readinto(target.data):  # None: nothing came in time
                return count
        except (OSError, http.client.HTTPException) as error:
            problem = repr(error)
        self._connection.close()
        raise ConnectionDropped(f"{self._where}: {problem}")

    def close(self) -> None:
        if not self._response.isclosed():  # something of the body is left: start afresh
            self._connection.close()
        self._response.close()
