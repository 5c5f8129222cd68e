"""What the proof will find is not hashed on arrival: in shared memory, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.servers.embedded.weights import ServedWeights
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.artifact import HEADER_BYTES
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import slice_digest
from easyrl.inference_client.vllm_plugin.easyrl_vllm.receiving import WeightReceiver
from tests.inference_client.written_artifact import WeightArtifact, write_artifact

WEIGHTS = {"weight": torch.randn(6, 5), "bias": torch.randn(6)}  # a file each
NONCE = bytes(range(32))


@pytest.fixture
def in_memory() -> Iterator[Announcement]:
    told = Announcement(SHARED_MEMORY / f"easyrl-test-unchecked-{os.getpid()}", "run")
    if told.memory is None:
        told.remove()
        pytest.skip(f"{SHARED_MEMORY} is not in memory")
    yield told
    told.remove()


def written(told: Announcement, name: str, *damaged: str) -> WeightArtifact:
    """``WEIGHTS``, with the lowest bit of the first number of those ``damaged`` flipped."""
    artifact = write_artifact(WEIGHTS.items(), told.root / name, name, 1)
    for chunk in artifact.chunks:
        if chunk.entries[0].name in damaged:
            with (artifact.directory / chunk.file).open("r+b") as file:
                file.seek(HEADER_BYTES)
                (first,) = file.read(1)
                file.seek(HEADER_BYTES)
                file.write(bytes([first ^ 1]))
    return artifact


def taken(
    receiver: WeightReceiver, artifact: WeightArtifact, *, proof_follows: bool
) -> dict[str, Tensor]:
    chunks = [chunk.describe(proof_follows=proof_follows) for chunk in artifact.chunks]
    tensors = receiver.tensors(artifact.name, chunks)
    return {name: tensor.clone() for name, tensor in tensors}


def test_a_provable_tensor_in_shared_memory_is_not_hashed(in_memory: Announcement) -> None:
    receiver = WeightReceiver(in_memory.init_info("file"))
    receiver.provable = {"weight"}
    found = taken(receiver, written(in_memory, "v1", "weight"), proof_follows=True)
    assert torch.equal(found["bias"], WEIGHTS["bias"])
    different = (found["weight"] != WEIGHTS["weight"]).nonzero().tolist()
    assert different == [[0, 0]]  # which the proof is there for
    with pytest.raises(ValueError, match="tensor 'bias' has hash"):
        taken(receiver, written(in_memory, "v2", "bias"), proof_follows=True)
    with pytest.raises(ValueError, match="tensor 'weight' has hash"):
        taken(receiver, written(in_memory, "v3", "weight"), proof_follows=False)
    receiver.close()


@pytest.mark.parametrize("transport", ["file", "http"])
def test_on_a_disk_and_over_http_all_is_hashed(tmp_path: Path, transport: str) -> None:
    told = Announcement(tmp_path / "root", "run")
    if transport == "file" and told.memory is not None:
        pytest.skip(f"{tmp_path} is in memory")
    with closing(ChunkServer(told.root, told.token)) as server:
        receiver = WeightReceiver(told.init_info(transport, server.url))
        receiver.provable = WEIGHTS.keys()
        with pytest.raises(ValueError, match="tensor 'weight' has hash"):
            taken(receiver, written(told, "v1", "weight"), proof_follows=True)
        receiver.close()


class Served:
    """The embedded server's weights, of a model that has ``WEIGHTS``' shapes."""

    def __init__(self, told: Announcement) -> None:
        def at_once(function: Callable[[], None]) -> Future[None]:
            done: Future[None] = Future()
            function()
            done.set_result(None)
            return done

        self.model = nn.Linear(5, 6)
        self.weights = ServedWeights(self.model, at_once, lambda: None)
        self.weights.announce(told.init_info("file")).result()

    def push(self, artifact: WeightArtifact) -> None:
        chunks = [chunk.describe(proof_follows=True) for chunk in artifact.chunks]
        self.weights.start().result()
        self.weights.load(artifact.name, chunks).result()
        self.weights.finish("v").result()

    def proves(self, name: str) -> bool:
        (shown,) = self.weights.prove(NONCE, WEIGHTS.keys()).result().slices[name]
        return shown.digest == slice_digest(WEIGHTS[name], NONCE)


def test_what_was_not_proved_before_is_hashed_on_arrival(in_memory: Announcement) -> None:
    """By a server that is new, or was announced to anew, as after every failure."""
    served = Served(in_memory)
    with pytest.raises(ValueError, match="tensor 'weight' has hash"):
        served.push(written(in_memory, "v1", "weight"))
    served.push(written(in_memory, "v2"))
    assert served.proves("weight") and served.proves("bias")
    served.weights.prove(NONCE, set()).result()  # asks for no tensor, as before a stamp
    served.push(written(in_memory, "v3", "weight"))
    assert not served.proves("weight") and served.proves("bias")
    served.weights.announce(in_memory.init_info("file")).result()
    with pytest.raises(ValueError, match="tensor 'weight' has hash"):
        served.push(written(in_memory, "v4", "weight"))
    served.weights.close()


def test_a_bit_that_flips_in_the_model_after_it_came_is_found(in_memory: Announcement) -> None:
    served = Served(in_memory)
    for name in ("v1", "v2"):  # checked on arrival, and not
        served.push(written(in_memory, name))
        assert served.proves("weight")
        served.model.weight.data.view(torch.int32)[3, 2] ^= 1
        assert not served.proves("weight") and served.proves("bias")
    served.weights.close()
