"""Weights on a shared folder: what is written is what is read, and damage is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor

from easyrl.inference_client.weight_transfer.artifact import (
    WeightArtifact,
    load_artifact,
    read_chunk,
    tensor_checksum,
    write_artifact,
)

WEIGHTS = {
    "embed.weight": torch.randn(16, 8),
    "layers.0.weight": torch.randn(8, 8).to(torch.bfloat16),
    "layers.1.weight": torch.randn(8, 4).t(),  # not contiguous
    "scalar": torch.tensor(3.0),
}


def write(tmp_path: Path, chunk_bytes: int = 300) -> WeightArtifact:
    return write_artifact(iter(WEIGHTS.items()), tmp_path / "weights", "run:1:2", chunk_bytes)


def test_round_trip_is_exact_in_both_dtypes(tmp_path: Path) -> None:
    artifact = load_artifact(write(tmp_path).directory)
    assert artifact == write(tmp_path)
    assert artifact.version == "run:1:2"
    read = {
        name: tensor
        for info in artifact.update_infos()
        for name, tensor in read_chunk(Path(info["path"]), info["checksums"])
    }
    assert read.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        assert read[name].dtype == weight.dtype
        assert torch.equal(read[name], weight)


def test_chunks_stay_below_the_limit_unless_one_tensor_is_larger(tmp_path: Path) -> None:
    artifact = write(tmp_path, chunk_bytes=300)
    assert [chunk.names for chunk in artifact.chunks] == [
        ("embed.weight",),  # 512 bytes
        ("layers.0.weight", "layers.1.weight", "scalar"),  # 128 + 128 + 4
    ]
    assert [chunk.num_bytes for chunk in artifact.chunks] == [512, 260]
    assert artifact.num_bytes == 772


def test_checksum_is_xxh3_of_the_bytes(tmp_path: Path) -> None:
    weight = WEIGHTS["embed.weight"]
    assert tensor_checksum(weight) == xxhash.xxh3_64(weight.numpy().tobytes()).hexdigest()
    assert write(tmp_path).checksums["embed.weight"] == tensor_checksum(weight)


def test_a_tensor_may_be_reused_after_the_next_is_asked_for(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(i)

    artifact = write_artifact(stream(), tmp_path / "weights", "v", 1 << 20)
    (info,) = artifact.update_infos()
    values = {name: t[0].item() for name, t in read_chunk(Path(info["path"]), info["checksums"])}
    assert values == {"w0": 0.0, "w1": 1.0, "w2": 2.0}


def test_an_error_while_writing_leaves_nothing_and_keeps_the_old_one(tmp_path: Path) -> None:
    old = write(tmp_path)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2)
        raise RuntimeError("lost a rank")

    with pytest.raises(RuntimeError, match="lost a rank"):
        write_artifact(broken(), old.directory, "run:1:3", 10)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert load_artifact(old.directory).version == "run:1:2"


def test_replaces_and_removes(tmp_path: Path) -> None:
    write(tmp_path)
    artifact = write_artifact(iter([("a", torch.zeros(2))]), tmp_path / "weights", "v3", 10)
    assert load_artifact(tmp_path / "weights").checksums.keys() == {"a"}
    artifact.remove()
    artifact.remove()
    assert not list(tmp_path.iterdir())


def test_name_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' was given twice"):
        write_artifact(iter([("a", torch.zeros(2))] * 2), tmp_path / "weights", "v", 10)


def test_damage_is_noticed(tmp_path: Path) -> None:
    info = write(tmp_path).update_infos()[0]
    path, checksums = Path(info["path"]), info["checksums"]
    with pytest.raises(ValueError, match="chunk-00000.safetensors: tensor 'embed.weight' has"):
        list(read_chunk(path, {"embed.weight": "0" * 16}))
    with pytest.raises(ValueError, match="does not hold tensor 'other'"):
        list(read_chunk(path, {**checksums, "other": "0" * 16}))
    with pytest.raises(ValueError, match="no checksum was given for tensor 'embed.weight'"):
        list(read_chunk(path, {}))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # one bit of the tensor
    path.write_bytes(data)
    with pytest.raises(ValueError, match="'embed.weight' has checksum"):
        list(read_chunk(path, checksums))
    path.write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        list(read_chunk(path, checksums))
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        list(read_chunk(tmp_path / "absent", checksums))


def test_incomplete_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="manifest.json missing"):
        load_artifact(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": "v"}')
    with pytest.raises(ValueError, match="not a weight manifest"):
        load_artifact(tmp_path)
