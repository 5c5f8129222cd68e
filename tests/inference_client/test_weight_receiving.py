"""The receiver: what comes out is what was written, and nothing that was not announced."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from easyrl.inference_client.vllm_plugin.easyrl_vllm import reading, receiving
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import MappedFiles, is_memory
from easyrl.inference_client.vllm_plugin.easyrl_vllm.receiving import WeightReceiver
from tests.inference_client.written_artifact import WeightArtifact, write_artifact

WEIGHTS = {
    "bf16": torch.randn(700, 1000).to(torch.bfloat16),  # several blocks
    "odd": torch.randn(3).to(torch.float16),  # what follows is not aligned in the file
    "fp32": torch.randn(33, 7),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "int8": torch.arange(5, dtype=torch.int8),
    "int64": torch.arange(5),
    "last": torch.randn(1000),
}


@pytest.fixture
def told(tmp_path: Path) -> Announcement:
    return Announcement(tmp_path / "root", "run")


@pytest.fixture
def artifact(told: Announcement) -> WeightArtifact:
    return write_artifact(WEIGHTS.items(), told.root / "v1", "run:1:1", 4096)


@pytest.fixture(params=["file", "http"])
def receiver(request: pytest.FixtureRequest, told: Announcement) -> Iterator[WeightReceiver]:
    with closing(ChunkServer(told.root, told.token)) as server:
        receiver = WeightReceiver(told.init_info(request.param, server.url))
        assert receiver.transport == request.param
        yield receiver
        receiver.close()


def chunks_of(artifact: WeightArtifact) -> list[dict[str, Any]]:
    """As they look after their way through JSON."""
    return json.loads(json.dumps(artifact.update_info()["chunks"]))


def taken(receiver: WeightReceiver, artifact: WeightArtifact, **kwargs: Any) -> dict[str, Tensor]:
    found = {}
    for name, tensor in receiver.tensors(artifact.name, chunks_of(artifact), **kwargs):
        assert tensor.data_ptr() % tensor.element_size() == 0
        found[name] = tensor.clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


def test_round_trip(receiver: WeightReceiver, artifact: WeightArtifact) -> None:
    assert len(artifact.chunks) > 2
    assert_same(taken(receiver, artifact), WEIGHTS)
    assert_same(taken(receiver, artifact), WEIGHTS)  # the same buffers again


def test_one_chunk_per_call(receiver: WeightReceiver, artifact: WeightArtifact) -> None:
    found = {}
    for chunk in chunks_of(artifact):
        for name, tensor in receiver.tensors(artifact.name, [chunk]):
            found[name] = tensor.clone()
    assert_same(found, WEIGHTS)


def test_tensors_of_a_chunk_stay_until_it_has_ended(
    receiver: WeightReceiver, told: Announcement
) -> None:
    weights = {f"{i}": torch.full((1000,), float(i)) for i in range(12)}
    artifact = write_artifact(weights.items(), told.root / "v1", "v", 3 * 4000)
    assert [len(chunk.checksums) for chunk in artifact.chunks] == [3] * 4
    held: list[tuple[str, Tensor]] = []
    for name, tensor in receiver.tensors(artifact.name, chunks_of(artifact)):
        held.append((name, tensor))
        time.sleep(0.002)  # the thread is ahead by now
        if len(held) % 3 == 0:
            for earlier, value in held[-3:]:
                assert torch.equal(value, weights[earlier])


def test_memory_is_bounded_by_two_chunks(receiver: WeightReceiver, told: Announcement) -> None:
    weights = {f"{i}": torch.randn(25_000) for i in range(20)}
    artifact = write_artifact(weights.items(), told.root / "v1", "v", 100_000)
    places = set()
    for _ in range(3):
        for name, tensor in receiver.tensors(artifact.name, chunks_of(artifact)):
            assert torch.equal(tensor, weights[name])
            places.add(tensor.data_ptr())
    assert len(places) == 2


def test_weights_go_straight_to_where_they_are_wanted(
    receiver: WeightReceiver, artifact: WeightArtifact
) -> None:
    own = {name: torch.empty_like(weight) for name, weight in WEIGHTS.items() if name != "fp32"}

    def target(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
        assert (dtype, shape) == (WEIGHTS[name].dtype, tuple(WEIGHTS[name].shape))
        return own.get(name)

    for name, tensor in receiver.tensors(artifact.name, chunks_of(artifact), target):
        assert torch.equal(tensor, WEIGHTS[name])
        assert name == "fp32" or tensor.data_ptr() == own[name].data_ptr()
    assert_same(own, {name: w for name, w in WEIGHTS.items() if name != "fp32"})


def test_a_target_may_refuse(receiver: WeightReceiver, artifact: WeightArtifact) -> None:
    def target(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
        raise ValueError(f"no {name} here")

    with pytest.raises(ValueError, match="no bf16 here"):
        taken(receiver, artifact, target=target)
    assert_same(taken(receiver, artifact), WEIGHTS)


def test_a_caller_may_stop_early(receiver: WeightReceiver, artifact: WeightArtifact) -> None:
    for _ in range(5):
        stream = receiver.tensors(artifact.name, chunks_of(artifact))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert_same(taken(receiver, artifact), WEIGHTS)


# ---- what must be refused ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/v1", "../root/v1", "v1\0", "a\\b", None])
def test_a_name_is_one_component(
    receiver: WeightReceiver, artifact: WeightArtifact, name: Any
) -> None:
    chunks = chunks_of(artifact)
    with pytest.raises(ValueError, match="must be a plain name"):
        receiver.tensors(name, chunks)
    chunks[0]["file"] = name
    with pytest.raises(ValueError, match="must be a plain name"):
        receiver.tensors(artifact.name, chunks)


def test_links_are_not_followed(
    told: Announcement, artifact: WeightArtifact, receiver: WeightReceiver, tmp_path: Path
) -> None:
    (told.root / "linked").symlink_to(artifact.directory)
    with pytest.raises(ValueError, match="linked"):
        list(receiver.tensors("linked", chunks_of(artifact)))
    chunk = artifact.chunks[0]
    outside = tmp_path / "outside"
    (artifact.directory / chunk.file).rename(outside)
    (artifact.directory / chunk.file).symlink_to(outside)
    with pytest.raises(ValueError, match=chunk.file):
        list(receiver.tensors(artifact.name, chunks_of(artifact)))


def test_a_pipe_does_not_hang(told: Announcement, artifact: WeightArtifact) -> None:
    receiver = WeightReceiver(told.init_info("file"))
    chunk = artifact.chunks[0]
    (artifact.directory / chunk.file).unlink()
    os.mkfifo(artifact.directory / chunk.file)
    with pytest.raises(ValueError, match="is not a regular file"):
        list(receiver.tensors(artifact.name, chunks_of(artifact)))
    receiver.close()


def test_wrong_hash_names_tensor_and_file(
    receiver: WeightReceiver, artifact: WeightArtifact
) -> None:
    chunks = chunks_of(artifact)
    assert list(chunks[1]["checksums"])[1] == "fp32"
    chunks[1]["checksums"]["fp32"] = "0" * 64
    found = []
    with pytest.raises(ValueError, match=f"{chunks[1]['file']}: tensor 'fp32' has hash"):
        for name, _ in receiver.tensors(artifact.name, chunks):
            found.append(name)
    assert found == ["bf16", "odd"]  # what came before it was right


def test_one_flipped_bit_is_noticed(receiver: WeightReceiver, artifact: WeightArtifact) -> None:
    path = artifact.directory / artifact.chunks[-1].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="tensor 'last' has hash"):
        taken(receiver, artifact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 5}, "has .* bytes, but header"),
        ({"checksums": {"other": "0" * 64}}, "does not hold tensor 'other'"),
        ({"checksums": {}}, "no checksum was given for tensor 'bf16'"),
        ({"file": "chunk-00099.safetensors"}, "chunk-00099.safetensors"),
    ],
)
def test_a_file_that_differs_from_what_was_announced(
    receiver: WeightReceiver, artifact: WeightArtifact, change: dict[str, Any], message: str
) -> None:
    chunk = chunks_of(artifact)[0] | change
    with pytest.raises(ValueError, match=message):
        list(receiver.tensors(artifact.name, [chunk]))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ({"file": "f"}, "needs file, num_bytes and checksums"),
        ("text", "needs file, num_bytes and checksums"),
        ({"file": "f", "num_bytes": "7", "checksums": {}}, "not a number of bytes"),
        ({"file": "f", "num_bytes": -1, "checksums": {}}, "not a number of bytes"),
        ({"file": "f", "num_bytes": 1, "checksums": []}, "must map names to hashes"),
        ({"file": "f", "num_bytes": 1, "checksums": {"a": "xyz"}}, "is not a blake3 hash"),
    ],
)
def test_malformed_announcements(told: Announcement, chunk: dict[str, Any], message: str) -> None:
    receiver = WeightReceiver(told.init_info("file"))
    with pytest.raises(ValueError, match=message):
        receiver.tensors("v1", [chunk])
    receiver.close()


def forged(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


FOUR = bytes(range(4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", "are no safetensors file"),
        (forged(b"{not json", FOUR), "not a safetensors header"),
        (forged([], FOUR), "not a safetensors header"),
        (forged({"a": {}}, FOUR), "not a safetensors header"),
        (forged({"a": 5}, FOUR), "not a safetensors header"),
        (
            forged({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, FOUR),
            "not a safetensors header",
        ),
        (
            forged({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, FOUR),
            "not a safetensors header",
        ),
        (
            forged({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, FOUR),
            "'a' is not where its shape says",
        ),
        (
            forged({"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}, FOUR),
            "'a' is not where its shape says",
        ),
        (
            forged({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, FOUR),
            "tensors of 3 bytes, announced 4",
        ),
        (forged(b" " * 200_000, FOUR), "a header of 200000 bytes is too long"),
        (forged({}, FOUR, length=2**62), "but header"),
    ],
)
def test_forged_files(told: Announcement, content: bytes, message: str) -> None:
    (told.root / "v1").mkdir()
    (told.root / "v1" / "chunk").write_bytes(content)
    receiver = WeightReceiver(told.init_info("file"))
    chunk = {"file": "chunk", "num_bytes": 4, "checksums": {"a": blake3(FOUR).hexdigest()}}
    with pytest.raises(ValueError, match=message):
        list(receiver.tensors("v1", [chunk]))
    receiver.close()


# ---- which way in --------------------------------------------------------------------------------


def test_the_root_is_used_only_if_it_is_the_trainers(told: Announcement, tmp_path: Path) -> None:
    with closing(ChunkServer(told.root, told.token)) as server:
        both = told.init_info("auto", server.url)
        assert WeightReceiver(both).transport == "file"
        other = Announcement(tmp_path / "other", "run")
        for root in (str(tmp_path / "absent"), str(other.root)):
            assert WeightReceiver(both | {"root": root}).transport == "http"


def test_no_way_in_names_both_and_why(told: Announcement, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    info = told.init_info("auto", f"http://127.0.0.1:{port}") | {"root": str(tmp_path)}
    with pytest.raises(ValueError) as raised:
        WeightReceiver(info)
    for part in (f"root {tmp_path}: not readable", str(port), "does not answer"):
        assert part in str(raised.value)
    with pytest.raises(ValueError, match="neither root nor url was announced"):
        WeightReceiver(info | {"root": None, "url": None})
    with pytest.raises(ValueError, match="must begin with http"):
        WeightReceiver(info | {"root": None, "url": "file:///etc"})
    with pytest.raises(ValueError, match="token is missing"):
        WeightReceiver({})


def test_what_is_announced(told: Announcement) -> None:
    url = "http://trainer:1234"
    assert told.token not in repr(told)
    assert (told.root / "announcement").read_text() == blake3(told.token.encode()).hexdigest()
    for transport, root, stream in (
        ("auto", str(told.root), url),
        ("file", str(told.root), None),
        ("http", None, url),
    ):
        assert told.init_info(transport, url) == {
            "run": "run",
            "token": told.token,
            "root": root,
            "url": stream,
        }
    with pytest.raises(ValueError, match="http needs the URL"):
        told.init_info("http")
    with pytest.raises(ValueError, match="'nccl' moves no files"):
        told.init_info("nccl")
    again = Announcement(told.root, "run")  # this one lives: see test_announcement
    assert again.token != told.token
    again.remove()
    again.remove()
    told.remove()
    assert not again.root.exists() and not told.root.exists()


# ---- connections that fail -----------------------------------------------------------------------


class Flaky(BaseHTTPRequestHandler):
    """Serves one file; drops the first connections after some of it, or misbehaves."""

    protocol_version = "HTTP/1.1"
    content = b""
    drops: list[int] = []  # bytes after which each of the next answers breaks off
    status = 200
    num_requests = 0

    def do_GET(self) -> None:  # noqa: N802
        if self.path == "/health":
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        Flaky.num_requests += 1
        self.send_response(self.status)
        if self.status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        end = Flaky.drops.pop(0) if Flaky.drops else len(self.content)
        self.wfile.write(self.content[:end])
        if end < len(self.content):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def flaky(artifact: WeightArtifact, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightReceiver]:
    monkeypatch.setattr(receiving, "RETRY_AFTER_S", 0.01)
    Flaky.content = (artifact.directory / artifact.chunks[1].file).read_bytes()
    Flaky.drops, Flaky.status, Flaky.num_requests = [], 200, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    receiver = WeightReceiver({"run": "r", "token": "t", "root": None, "url": url})
    yield receiver
    receiver.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("handover", [1, 1 << 20])
def test_a_dropped_connection_is_tried_again(
    flaky: WeightReceiver,
    artifact: WeightArtifact,
    handover: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a small handover, tensors are with the caller already when the connection drops."""
    monkeypatch.setattr(receiving, "HANDOVER_BYTES", handover)
    Flaky.drops = [3, 65536 + 100, len(Flaky.content) - 1]
    chunk = chunks_of(artifact)[1]
    found = [(name, tensor.clone()) for name, tensor in flaky.tensors("v1", [chunk])]
    assert [name for name, _ in found] == list(chunk["checksums"])  # each once
    assert_same(dict(found), {name: WEIGHTS[name] for name in chunk["checksums"]})
    assert Flaky.num_requests == 4


def test_a_connection_that_always_drops(flaky: WeightReceiver, artifact: WeightArtifact) -> None:
    Flaky.drops = [100] * 50
    with pytest.raises(ValueError, match="the connection ended or hangs"):
        list(flaky.tensors("v1", [chunks_of(artifact)[1]]))
    assert Flaky.num_requests == receiving.NUM_ATTEMPTS


@pytest.mark.parametrize("status", [302, 401, 404, 500])
def test_other_answers_are_refused_at_once(
    flaky: WeightReceiver, artifact: WeightArtifact, status: int
) -> None:
    Flaky.status = status
    with pytest.raises(ValueError, match=f"status {status}, expected 200"):
        list(flaky.tensors("v1", [chunks_of(artifact)[1]]))
    assert Flaky.num_requests == 1  # no redirect is followed, nothing is tried again


def test_an_answer_that_hangs_is_given_up(
    flaky: WeightReceiver, artifact: WeightArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "TIMEOUT_S", 1)
    monkeypatch.setattr(receiving, "NUM_ATTEMPTS", 1)
    flaky._source._connection.close()  # type: ignore[attr-defined]
    release = threading.Event()

    def slow(self: Flaky) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content[:10])
        release.wait(20)

    monkeypatch.setattr(Flaky, "do_GET", slow)
    with pytest.raises(ValueError, match="ended or hangs"):
        list(flaky.tensors("v1", [chunks_of(artifact)[1]]))
    release.set()


def test_close_ends_a_read_that_hangs(flaky: WeightReceiver, artifact: WeightArtifact) -> None:
    release = threading.Event()
    started = threading.Event()

    def slow(self: Flaky) -> None:
        started.set()
        release.wait(20)

    Flaky.do_GET, do_get = slow, Flaky.do_GET  # type: ignore[method-assign]
    problems: list[Exception] = []

    def read() -> None:
        try:
            list(flaky.tensors("v1", [chunks_of(artifact)[1]]))
        except ValueError as error:
            problems.append(error)

    try:
        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(10)
        flaky.close()
        reader.join(10)
        assert not reader.is_alive() and len(problems) == 1
    finally:
        Flaky.do_GET = do_get  # type: ignore[method-assign]
        release.set()


# ---- shared memory that is written again ---------------------------------------------------------


@pytest.fixture
def in_memory() -> Iterator[Announcement]:
    told = Announcement(SHARED_MEMORY / f"easyrl-test-receiving-{os.getpid()}", "run")
    if told.memory is None:
        told.remove()
        pytest.skip(f"{SHARED_MEMORY} is not in memory")
    yield told
    told.remove()


def test_files_that_are_written_again_are_mapped(in_memory: Announcement) -> None:
    told = in_memory
    receiver = WeightReceiver(told.init_info("file"))
    mapped: MappedFiles = receiver._source._mapped  # type: ignore[attr-defined]
    current: WeightArtifact | None = None
    num_mapped = []
    for version in range(6):
        weights = {name: weight + version for name, weight in WEIGHTS.items()}
        if version == 4:
            weights["last"] = torch.randn(7)  # its file has another size
        artifact = write_artifact(
            weights.items(), told.root / f"v{version}", "v", 4096, memory=told.memory
        )
        assert_same(taken(receiver, artifact), weights)
        if current is not None:
            current.remove()
        current = artifact
        num_mapped.append(len(mapped._mapped))
    assert num_mapped[:4] == [0, 0, 3, 6]
    shutil.rmtree(told.root)
    mapped.sweep()
    assert not mapped._mapped
    receiver.close()


def test_memory_of_a_trainer_that_is_gone_is_let_go(in_memory: Announcement) -> None:
    path = in_memory.root / "file"
    path.write_bytes(b"12345678")
    mapped = MappedFiles(in_memory.root)
    with path.open("rb") as file:
        assert mapped.memory_of(file.fileno()) is None
        memory = mapped.memory_of(file.fileno())
    assert memory is not None and bytes(memory) == b"12345678"
    with path.open("r+b") as file:
        file.write(b"abcdefgh")
    assert bytes(memory) == b"abcdefgh"  # the file itself, not a copy
    mapped.sweep()
    assert len(mapped._mapped) == 1
    path.unlink()
    mapped.sweep()
    assert not mapped._mapped
    mapped.close()


def test_a_disk_is_not_taken_for_memory() -> None:
    assert not is_memory(Path("/proc"))
    assert not is_memory(Path("/nowhere"))
