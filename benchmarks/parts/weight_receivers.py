"""What a receiver's process of ``benchmarks.weight_sync`` runs."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import Bytes, map_file
from easyrl.inference_client.vllm_plugin.easyrl_vllm.receiving import WeightReceiver
from easyrl.runtime.machine import pin_process

BLOCK_BYTES = 2**20  # of the plain client


@dataclass(frozen=True)
class Plan:
    """What all receivers do."""

    shapes: Mapping[str, tuple[int, ...]]  # of the bf16 weights
    announcements: Mapping[str, Mapping[str, Any]]  # init_info by transport
    root: str
    plain_url: str


def receive_weights(pipe: Connection, plan: Plan, cpu: int) -> None:
    """Answers commands until the other end closes."""
    torch.set_num_threads(1)
    pin_process(0, [cpu])
    receiver = Receiver(plan)
    commands: dict[str, Callable[..., None]] = {
        "copy": receiver.copy,
        "download": receiver.download,
    }
    pipe.send(None)
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "chunk":
                receiver.take_chunks(pipe, arguments)
            else:
                commands[command](*arguments)
        except Exception as error:
            pipe.send(repr(error))
            raise
        pipe.send(None)


class Receiver:
    """One receiver's own copy of the weights, in memory that has been touched."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        sizes = {name: torch.Size(shape).numel() for name, shape in plan.shapes.items()}
        self._data = torch.ones(sum(sizes.values()), dtype=torch.bfloat16)
        self._weights: dict[str, Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self._weights[name] = self._data[start : start + size].view(plan.shapes[name])
            start += size
        self._memory: Bytes = self._data.view(torch.uint8).numpy()
        self._receivers = {name: WeightReceiver(told) for name, told in plan.announcements.items()}
        self._mapped: dict[int, Bytes] = {}  # by inode

    def take_chunks(self, pipe: Connection, first: list[Any]) -> None:
        """Chunks as they are announced, those that wait together in one update."""
        transport, artifact, chunk = first
        chunks = [chunk]
        is_last = False
        received = 0
        while chunks or not is_last:
            while not is_last and (pipe.poll() or not chunks):
                command, *arguments = pipe.recv()
                is_last = command == "end"
                if not is_last:
                    chunks.append(arguments[2])
            tensors = self._receivers[transport].tensors(artifact, chunks, self._place)
            received += sum(weight.nbytes for _, weight in tensors)
            chunks = []
        assert received == self._data.nbytes, (received, self._data.nbytes)

    def copy(self, files: list[str]) -> None:
        """The same bytes, with nothing but a copy from shared memory."""
        start = 0
        for file in files:
            source = self._map(Path(self._plan.root) / file)
            end = min(start + len(source), len(self._memory))
            np.copyto(self._memory[start:end], source[: end - start])
            start = end

    def download(self, files: list[str]) -> None:
        """The same files with a plain client, into the same memory."""
        parts = urlsplit(self._plan.plain_url)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port)
        start = 0
        for file in files:
            connection.request("GET", f"/{file}")
            response = connection.getresponse()
            assert response.status == 200 and response.length is not None
            left = response.length
            while left:
                end = min(start + min(left, BLOCK_BYTES), len(self._memory))
                target = memoryview(self._memory[start:end])
                if not len(target):  # headers make the files longer than the weights
                    start = 0
                    continue
                count = response.readinto(target)
                left -= count
                start += count
        connection.close()

    def _place(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        weight = self._weights[name]
        assert weight.dtype == dtype and tuple(weight.shape) == shape
        return weight

    def _map(self, path: Path) -> Bytes:
        status = path.stat()
        if status.st_ino not in self._mapped:
            self._mapped[status.st_ino] = map_file(path, status.st_size)
            self._mapped[status.st_ino].max()  # touched
        return self._mapped[status.st_ino]
