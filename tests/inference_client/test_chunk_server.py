"""The HTTP stream of the weights: complete chunks for holders of the token, nothing else."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from easyrl.inference_client.transfer.chunk_server import ChunkServer

TOKEN = "right"
CHUNK = "chunk-00000.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "run-1-7").mkdir(parents=True)
    (root / "run-1-7" / CHUNK).write_bytes(bytes(range(256)) * 5000)
    (root / "run-1-7" / f".{CHUNK}.part").write_bytes(b"unfinished")
    (root / "run-1-7" / "manifest.json").write_text("{}")
    (root / "announcement").write_text("hash")
    (root / ".free").mkdir()
    (root / ".free" / CHUNK).write_bytes(b"old")
    (tmp_path / CHUNK).write_bytes(b"outside")
    (root / "linked").symlink_to(tmp_path)
    (root / "run-1-7" / "chunk-00001.safetensors").symlink_to(tmp_path / CHUNK)
    os.mkfifo(root / "run-1-7" / "chunk-00002.safetensors")
    (root / "run-1-7" / "chunk-00003.safetensors").mkdir()
    (root / "run-1-7" / "chunk-00004.safetensors").touch()
    return root


@pytest.fixture
def server(root: Path) -> Iterator[ChunkServer]:
    with closing(ChunkServer(root, TOKEN)) as server:
        yield server


def get(
    server: ChunkServer, path: str, token: str | None = TOKEN, method: str = "GET"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def test_a_chunk_for_the_holder_of_the_token(server: ChunkServer, root: Path) -> None:
    whole = (root / "run-1-7" / CHUNK).read_bytes()
    assert get(server, f"/run-1-7/{CHUNK}") == (200, whole)
    assert get(server, "/run-1-7/chunk-00004.safetensors") == (200, b"")


def test_a_file_that_is_cut_while_it_is_sent_ends_its_connection(
    server: ChunkServer, root: Path
) -> None:
    path = root / "run-1-7" / CHUNK
    with path.open("r+b") as file:
        file.truncate(2**28)  # more than waits in sockets
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connection.request("GET", f"/run-1-7/{CHUNK}", headers=headers)
        response = connection.getresponse()
        assert response.length == 2**28
        with path.open("r+b") as file:
            file.truncate(2**20)
        with pytest.raises(http.client.IncompleteRead):
            response.read()
    assert get(server, "/health") == (200, b"ok")


@pytest.mark.parametrize("token", [None, "", "wrong", "righ", "rightt", "Right"])
def test_others_learn_nothing(server: ChunkServer, token: str | None) -> None:
    answers = {get(server, path, token) for path in (f"/run-1-7/{CHUNK}", "/nowhere", "/")}
    assert answers == {(401, b"Unauthorized")}
    assert get(server, "/health", token) == (200, b"ok")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/announcement",
        "/run-1-7",
        "/run-1-7/",
        "/run-1-7/manifest.json",
        f"/run-1-7/.{CHUNK}.part",
        f"/.free/{CHUNK}",
        f"/linked/{CHUNK}",
        f"/../{CHUNK}",
        f"/..%2f{CHUNK}",
        f"/run-1-7/..%2f..%2f{CHUNK}",
        f"/run-1-7/../run-1-7/{CHUNK}",
        f"/run-1-7/{CHUNK}?a",
        f"/run-1-8/{CHUNK}",
        "/run-1-7/chunk-00001.safetensors",
        "/run-1-7/chunk-00002.safetensors",
        "/run-1-7/chunk-00003.safetensors",
        "/run-1-7/chunk-00009.safetensors",
    ],
)
def test_only_finished_chunks_below_the_root(server: ChunkServer, path: str) -> None:
    assert get(server, path) == (404, b"Not Found")


def test_other_methods_are_not_known(server: ChunkServer) -> None:
    assert get(server, f"/run-1-7/{CHUNK}", method="POST")[0] == 501


def test_a_connection_serves_several_requests(server: ChunkServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for _ in range(3):
        connection.request("GET", f"/run-1-7/{CHUNK}", headers={"Authorization": f"Bearer {TOKEN}"})
        response = connection.getresponse()
        assert len(response.read()) == 256 * 5000
    connection.close()


def test_one_that_reads_nothing_does_not_hold_up_others(server: ChunkServer) -> None:
    request = f"GET /run-1-7/{CHUNK} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.sendall(request.encode() * 5)
        assert get(server, f"/run-1-7/{CHUNK}")[0] == 200
    assert get(server, "/health")[0] == 200  # after it has hung up, too


def test_the_token_is_not_on_the_command_line(server: ChunkServer) -> None:
    command = Path(f"/proc/{server.pid}/cmdline")
    if not command.exists():
        pytest.skip("no /proc")
    assert TOKEN.encode() not in command.read_bytes()


def test_a_port_that_is_taken(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*weight_sync.port"):
            ChunkServer(root, TOKEN, port=port)


def test_close_ends_it(root: Path) -> None:
    server = ChunkServer(root, TOKEN)
    assert server.is_alive
    server.close()
    server.close()
    assert not server.is_alive


def test_it_outlives_the_thread_that_started_it(root: Path) -> None:
    servers: list[ChunkServer] = []
    thread = threading.Thread(target=lambda: servers.append(ChunkServer(root, TOKEN)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert get(servers[0], "/health")[0] == 200
    servers[0].close()


PARENT = """
import sys, time
from pathlib import Path
from easyrl.inference_client.transfer.chunk_server import ChunkServer
server = ChunkServer(Path(sys.argv[1]), "t")
print(server.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_its_parent(root: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """A zombie that nobody has waited for does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
