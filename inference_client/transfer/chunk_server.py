"""The HTTP stream of the weights: a process of its own that serves finished chunk files.

``GET /{artifact}/{file}`` with ``Authorization: Bearer {token}``, and ``GET /health``. It shares
nothing with the trainer but the files, so that neither slows the other, and ends with it. Only the
standard library is imported: the kernel moves the bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import select
import socket
import socketserver
import stat
import struct
import subprocess
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import BinaryIO

START_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 600  # of a connection: longer than most batches
WATCH_INTERVAL_S = 1.0
# a file that is being written has another name, and so have those that wait for their next use
CHUNK_PATH = re.compile(r"/([A-Za-z0-9_][A-Za-z0-9_.:-]*)/(chunk-\d{5,}\.safetensors)")


class ChunkServer:
    """Starts the process.

    Args:
        root: folder of the artifacts.
        token: that a request has to show.
        host, port: to listen at; port 0 takes a free one.

    Raises ``OSError`` naming host and port if it cannot listen there.
    """

    def __init__(self, root: Path, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(root), host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the trainer, who then closes it
        )
        try:
            assert self._process.stdin is not None
            # on the command line everyone on this machine could read the token
            self._process.stdin.write(f"{token}\n".encode())
            self._process.stdin.flush()
            self.port = self._read_port(host, port)
        except BaseException:
            self.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process; safe to call twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _read_port(self, host: str, port: int) -> int:
        answer = self._process.stdout
        assert answer is not None
        ready, _, _ = select.select([answer], [], [], START_TIMEOUT_S)
        line = answer.readline().decode().strip() if ready else "no answer from its process"
        if not line.isdigit():
            raise OSError(
                f"weights cannot be served over HTTP at {host}:{port}: {line or 'process ended'}; "
                "check weight_sync.advertise_host and weight_sync.port"
            )
        return int(line)


# ---- in the process ----------------------------------------------------------------------------


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread per connection: while it sends, it is in the kernel."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, root: Path, token: str, host: str, port: int) -> None:
        self.root = root
        self.expected = f"Bearer {token}".encode()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A receiver that hangs up is its own matter."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # connections stay open
    server_version, sys_version = "easyrl", ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        # the kernel's own limits: with Python's, a socket is polled before every call
        limit = struct.pack("ll", IDLE_TIMEOUT_S, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.connection.setsockopt(socket.SOL_SOCKET, option, limit)

    def do_GET(self) -> None:  # noqa: N802 (the base class's name)
        if self.path == "/health":
            self._answer(HTTPStatus.OK)
        elif not self._is_authorized():
            self._answer(HTTPStatus.UNAUTHORIZED)
        elif (file := _open_chunk(self.server.root, self.path)) is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            with file:
                self._send(file)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the receivers report what goes wrong."""

    def _is_authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        return hmac.compare_digest(given, self.server.expected)

    def _answer(self, status: HTTPStatus) -> None:
        body = b"ok" if status == HTTPStatus.OK else status.phrase.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        sent = 0
        while sent < size:
            count = os.sendfile(self.connection.fileno(), file.fileno(), sent, size - sent)
            if count == 0:  # cut since: the receiver has to see that no more will come
                self.close_connection = True
                return
            sent += count


def _open_chunk(root: Path, path: str) -> BinaryIO | None:
    """The chunk file that a request names; None if there is none, or a link in its way."""
    if (match := CHUNK_PATH.fullmatch(path)) is None:
        return None
    folder = opened = -1
    try:
        folder = os.open(root / match[1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        opened = os.open(match[2], flags, dir_fd=folder)
    except OSError:
        return None
    finally:
        if folder >= 0:
            os.close(folder)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        return None
    return open(opened, "rb", buffering=0)


def _end_with_parent(parent_pid: int) -> None:
    """Ends this process when the pipe from the parent closes, or the parent is another one."""
    while os.getppid() == parent_pid:
        ready, _, _ = select.select([sys.stdin], [], [], WATCH_INTERVAL_S)
        if ready and not os.read(sys.stdin.fileno(), 1):
            break
    os._exit(0)


def main() -> None:
    """``root host port`` as arguments, the token as the first line of standard input."""
    parent_pid = os.getppid()
    root, host, port = sys.argv[1:]
    token = sys.stdin.readline().strip()
    if not token:
        sys.exit(1)
    try:
        server = _Server(Path(root), token, host, int(port))
    except OSError as error:
        print(error, flush=True)
        sys.exit(1)
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
