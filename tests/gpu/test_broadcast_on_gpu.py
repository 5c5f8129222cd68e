"""Weights by broadcast, from a pass over reused device memory to the group; one rank.

Ours is what runs: ``Broadcaster``, ``TensorTee``, ``Broadcast`` and ``EndpointsClient``, in their
threads and streams. vLLM's engine, which a trainer's environment may lack, is stood in for by one
that broadcasts each tensor with ``torch.distributed``: NCCL on a GPU, gloo on a CPU. A group of one
rank has no receiver: that vLLM's workers get the bits, two devices with vLLM would have to show.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.device import DEVICE, ON_CUDA, marks

pytestmark = marks

LARGEST = 2**22  # entries


class Engine:
    """In the place of vLLM's trainer-side engine."""

    received: dict[str, Tensor]

    @classmethod
    def trainer_init(cls, init_info: Any, client: Any, source: Any) -> Engine:
        assert init_info.world_size == 1 + client.num_workers == 1
        engine = cls()
        engine.client, engine.source = client, source  # type: ignore[attr-defined]
        cls.received = {}
        return engine

    def send_weights(self) -> None:
        expected = {meta.name: meta for meta in self.source.metadata()}  # type: ignore[attr-defined]
        for name, weight in self.source:  # type: ignore[attr-defined]
            assert (expected[name].dtype, expected[name].shape) == (weight.dtype, weight.shape)
            dist.broadcast(weight, src=0)
            Engine.received[name] = weight.clone()

    def shutdown(self) -> None:
        pass


@pytest.fixture
def vllm_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package = "vllm.distributed.weight_transfer"
    for name in ("vllm", "vllm.distributed", package, f"{package}.base", f"{package}.nccl_engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sources: Any = type("WeightSource", (), {"register": staticmethod(lambda cls: cls)})
    sys.modules[f"{package}.base"].WeightSource = sources  # type: ignore[attr-defined]
    backend: Any = sys.modules[f"{package}.nccl_engine"]
    backend.NCCLTrainerWeightTransferEngine = Engine
    backend.NCCLTrainerInitInfo = SimpleNamespace


@pytest.fixture
def one_rank() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    backend = "nccl" if ON_CUDA else "gloo"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    """As an engine gathers them: each in the memory of the one before, overwritten behind it."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shared = torch.empty(LARGEST, device=DEVICE)
    for number in range(12):
        size = LARGEST >> (number % 4)
        shared[:size].normal_(generator=generator)
        weight = shared[:size] if number % 2 else shared[:size].to(torch.bfloat16)
        yield f"layer.{number}", weight
        shared.fill_(torch.nan)
        weight.fill_(torch.nan)


@pytest.mark.usefixtures("vllm_stand_in", "one_rank")
def test_the_group_gets_the_bits_of_each_pass() -> None:
    from easyrl.inference_client.transfer.broadcast import Broadcast, EndpointsClient
    from easyrl.weight_sync.broadcasting import Broadcaster

    class NoWorkers(EndpointsClient):
        """There are none in a group of one rank."""

        def __init__(self) -> None:
            self.num_workers = 0
            self.weight_version = None

        def close(self) -> None:
            pass

    client = NoWorkers()
    broadcaster = Broadcaster(
        lambda urls, metadata: Broadcast(
            "nccl", metadata, client, master_address="127.0.0.1", master_port=1, buffer_bytes=1
        ),
        timeout_s=60.0,
    )
    assert broadcaster.begin() is None  # names and shapes are not known before a first pass
    for _ in broadcaster.note(weights(0)):
        pass
    for version in (1, 2):
        expected = {name: weight.to("cpu", copy=True) for name, weight in weights(version)}
        tee = broadcaster.begin()
        assert tee is not None
        sending = threading.Thread(
            target=asyncio.run, args=(broadcaster.send([], {}, f"run:0:{version}", tee),)
        )
        sending.start()
        passed = {
            name: weight.to("cpu", copy=True) for name, weight in tee.pass_on(weights(version))
        }
        sending.join(60.0)
        assert not sending.is_alive() and client.weight_version == f"run:0:{version}"
        assert passed.keys() == Engine.received.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(Engine.received[name].cpu(), weight), name
            assert torch.equal(passed[name], weight), name
    broadcaster.close()
