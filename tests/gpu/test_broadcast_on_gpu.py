"""Weights by NCCL broadcast between two devices of one machine."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.gpu.device import marks

pytestmark = [
    *marks,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def _rank(rank: int, port: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for seed, dtype in enumerate((torch.bfloat16, torch.float32)):
        generator = torch.Generator().manual_seed(seed)
        expected = torch.randn(1 << 20, generator=generator).to(dtype)
        weight = expected.cuda() if rank == 0 else torch.zeros_like(expected, device="cuda")
        dist.broadcast(weight, src=0)
        assert torch.equal(weight.cpu(), expected)
    dist.destroy_process_group()


def test_two_devices_get_the_same_bits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port,), nprocs=2)
