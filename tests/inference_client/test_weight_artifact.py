"""Weights on a shared folder: what is written is what is read, by anyone's safetensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.artifact import Chunk, ReusedMemory, tensor_checksum
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import is_memory
from tests.inference_client.written_artifact import WeightArtifact, write_artifact

WEIGHTS = {
    "embed.weight": torch.randn(16, 8),
    "layers.0.weight": torch.randn(8, 8).to(torch.bfloat16),
    "layers.1.weight": torch.randn(8, 4).t(),  # not contiguous
    "odd": torch.randn(3).to(torch.float16),  # what follows is not aligned to its size
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "ids": torch.arange(5),
}


@pytest.fixture
def memory_root(tmp_path: Path) -> Iterator[Path]:
    """A folder in shared memory."""
    root = SHARED_MEMORY / f"easyrl-test-{os.getpid()}"
    root.mkdir()
    if not is_memory(root):
        root.rmdir()
        pytest.skip(f"{SHARED_MEMORY} is not in memory")
    yield root
    subprocess.run(["rm", "-rf", str(root)], check=True)


def write(tmp_path: Path, chunk_bytes: int = 300) -> WeightArtifact:
    return write_artifact(WEIGHTS.items(), tmp_path / "weights", "run:1:2", chunk_bytes)


def read(artifact: WeightArtifact) -> dict[str, Tensor]:
    """With the official library."""
    found: dict[str, Tensor] = {}
    for chunk in artifact.chunks:
        held = load_file(artifact.directory / chunk.file)
        assert held.keys() == chunk.checksums.keys()
        found |= held
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


def test_the_official_library_reads_the_same_bits(tmp_path: Path) -> None:
    assert_same(read(write(tmp_path)), WEIGHTS)
    assert_same(read(write(tmp_path, chunk_bytes=1 << 20)), WEIGHTS)


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_bytes())


def test_the_manifest_says_what_endpoints_are_told(tmp_path: Path) -> None:
    artifact = write(tmp_path)
    described = [
        {"file": chunk.file, "num_bytes": chunk.num_bytes, "checksums": chunk.checksums}
        for chunk in artifact.chunks
    ]
    assert manifest(artifact.directory) == {"version": "run:1:2", "chunks": described}
    assert (artifact.version, artifact.name) == ("run:1:2", "weights")
    assert artifact.update_info() == {"artifact": "weights", "chunks": described}
    assert artifact.update_info(artifact.chunks[1:])["chunks"] == [
        chunk.describe() for chunk in artifact.chunks[1:]
    ]


def test_chunks_stay_below_the_limit_unless_one_tensor_is_larger(tmp_path: Path) -> None:
    artifact = write(tmp_path, chunk_bytes=300)
    assert [tuple(chunk.checksums) for chunk in artifact.chunks] == [
        ("embed.weight",),  # 512 bytes
        ("layers.0.weight", "layers.1.weight", "odd", "scalar", "empty"),  # 128 + 128 + 6 + 4
        ("ids",),
    ]
    assert [chunk.num_bytes for chunk in artifact.chunks] == [512, 266, 40]


def test_a_chunk_ends_when_its_header_is_full(tmp_path: Path) -> None:
    weights = {f"{index}.{'x' * 200}": torch.tensor([float(index)]) for index in range(600)}
    artifact = write_artifact(weights.items(), tmp_path / "many", "v", 1 << 20)
    assert len(artifact.chunks) > 1
    assert_same(read(artifact), weights)


def test_checksum_is_blake3_of_the_bytes(tmp_path: Path) -> None:
    checksums = write(tmp_path).checksums
    for name, weight in WEIGHTS.items():
        data = weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert checksums[name] == blake3(data).hexdigest() == tensor_checksum(weight)


def test_a_chunk_can_be_read_when_it_is_announced(tmp_path: Path) -> None:
    written: list[str] = []
    read_by_then: list[list[str]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, weight in WEIGHTS.items():
            written.append(name)
            yield name, weight

    def on_chunk(chunk: Chunk) -> None:
        held = load_file(tmp_path / "weights" / chunk.file)
        assert_same(held, {name: WEIGHTS[name] for name in chunk.checksums})
        assert not (tmp_path / "weights" / "manifest.json").exists()
        read_by_then.append(list(written))

    artifact = write_artifact(stream(), tmp_path / "weights", "v", 300, on_chunk)
    # the first chunk was announced when only the tensor that did not fit into it had come
    assert read_by_then[0] == ["embed.weight", "layers.0.weight"]
    assert len(read_by_then) == len(artifact.chunks)


def test_a_tensor_may_be_reused_after_the_next_is_asked_for(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(i)

    found = read(write_artifact(stream(), tmp_path / "weights", "v", 1 << 20))
    assert {name: t[0].item() for name, t in found.items()} == {"w0": 0.0, "w1": 1.0, "w2": 2.0}


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from WEIGHTS.items()
        raise RuntimeError("lost a rank")

    with pytest.raises(RuntimeError, match="lost a rank"):
        write_artifact(broken(), tmp_path / "weights", "run:1:3", 300)
    assert not list(tmp_path.iterdir())


def test_replaces_and_removes(tmp_path: Path) -> None:
    write(tmp_path)
    artifact = write_artifact([("a", torch.zeros(2))], tmp_path / "weights", "v3", 10)
    (chunk,) = manifest(tmp_path / "weights")["chunks"]
    assert chunk["checksums"].keys() == {"a"}
    artifact.remove()
    artifact.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("a", torch.zeros(2))] * 2, "'a' was given twice"),
        ([("a", torch.zeros(2, dtype=torch.complex64))], "'a': torch.complex64 cannot be sent"),
        ([("a" * 70_000, torch.zeros(2))], "a name of 70000 letters is too long"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, weights: list[tuple[str, Tensor]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_artifact(weights, tmp_path / "weights", "v", 10)
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from easyrl.inference_client.transfer.artifact import write_artifact
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
weights = {"a": torch.zeros(10_000), "b": torch.zeros(100_000)}
write_artifact(weights.items(), Path(sys.argv[1]), "v", 1 << 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of a file as Linux does")
def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "weights")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and "OSError" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_folder_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space for 512 more bytes of weights") as raised:
        write(tmp_path)
    assert raised.value.filename == str(tmp_path / "weights")
    assert raised.value.errno == 28
    assert not list(tmp_path.iterdir())


# ---- memory that is written again ----------------------------------------------------------------


def inodes(artifact: WeightArtifact) -> set[int]:
    return {(artifact.directory / chunk.file).stat().st_ino for chunk in artifact.chunks}


def test_new_versions_take_the_files_of_old_ones(memory_root: Path) -> None:
    memory = ReusedMemory(memory_root)
    seen: list[set[int]] = []
    current: WeightArtifact | None = None
    for version in range(6):
        weights = {name: weight + version for name, weight in WEIGHTS.items()}
        artifact = write_artifact(
            weights.items(), memory_root / f"v{version}", "v", 300, memory=memory
        )
        assert_same(read(artifact), weights)
        if current is not None:
            current.remove()
            assert not current.directory.exists()
        current = artifact
        seen.append(inodes(artifact))
    # two sets of files take turns
    assert seen[2] == seen[0] == seen[4]
    assert seen[3] == seen[1] == seen[5]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("numel", [0, 3, 5000, 100_000])
def test_files_of_another_size_are_not_taken(memory_root: Path, numel: int) -> None:
    memory = ReusedMemory(memory_root)
    first = write_artifact(
        [("a", torch.ones(6000))], memory_root / "v1", "v", 1 << 20, memory=memory
    )
    (old,) = inodes(first)
    first.remove()
    weights = {"a": torch.randn(numel), "b": torch.randn(1)}
    second = write_artifact(weights.items(), memory_root / "v2", "v", 1 << 20, memory=memory)
    assert_same(read(second), weights)
    assert old not in inodes(second)
    with safe_open(second.directory / second.chunks[0].file, framework="pt") as file:
        assert set(file.keys()) == {"a", "b"}


def test_a_file_that_was_cut_meanwhile_is_not_taken(memory_root: Path) -> None:
    """A write behind the end of a mapped file ends the process by a signal."""
    memory = ReusedMemory(memory_root)
    big = {"a": torch.randn(6000)}
    for version in ("v1", "v2"):  # the second time the file is mapped
        artifact = write_artifact(big.items(), memory_root / version, "v", 1 << 20, memory=memory)
        if version == "v2":
            os.truncate(artifact.directory / artifact.chunks[0].file, 10)
        artifact.remove()
    assert memory.take("chunk-00000.safetensors", memory_root / "taken") is None
    again = write_artifact(big.items(), memory_root / "v3", "v", 1 << 20, memory=memory)
    assert_same(read(again), big)


def test_an_error_while_writing_over_leaves_nothing(memory_root: Path) -> None:
    memory = ReusedMemory(memory_root)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from WEIGHTS.items()
        raise RuntimeError("lost a rank")

    write_artifact(WEIGHTS.items(), memory_root / "v1", "v", 300, memory=memory).remove()
    with pytest.raises(RuntimeError, match="lost a rank"):
        write_artifact(broken(), memory_root / "v2", "v", 300, memory=memory)
    assert [path.name for path in memory_root.iterdir()] == [".free"]
    again = write_artifact(WEIGHTS.items(), memory_root / "v3", "v", 300, memory=memory)
    assert_same(read(again), WEIGHTS)


def test_only_memory_is_written_again() -> None:
    with TemporaryDirectory(dir=Path.cwd()) as on_disk:
        if is_memory(Path(on_disk)):
            pytest.skip("the checkout is in memory")
        assert Announcement(Path(on_disk) / "easyrl-run", "run").memory is None
