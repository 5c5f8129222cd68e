"""What a receiver's process of ``benchmarks.weight_sync`` runs."""

from __future__ import annotations

import http.client
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from easyrl.inference_client.servers.embedded.weights import ServedWeights
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import Bytes, map_file
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice
from easyrl.weight_sync.challenge import NONCE_BYTES
from easyrl.weight_sync.target import MOST_CHUNKS

BLOCK_BYTES = 2**20  # of the plain client


@dataclass(frozen=True)
class Plan:
    """What all receivers do."""

    shapes: Mapping[str, tuple[int, ...]]  # of the bf16 weights
    announcements: Mapping[str, Mapping[str, Any]]  # init_info by transport
    root: str
    plain_url: str


@dataclass(frozen=True)
class Answer:
    """To one command."""

    value: Any
    core_s: float  # seconds of processor time in this process


def receive_weights(pipe: Connection, plan: Plan) -> None:
    """Answers commands until the other end closes."""
    torch.set_num_threads(1)
    receiver = Receiver(plan)
    commands: dict[str, Callable[..., object]] = {
        "announce": receiver.announce,
        "receive": lambda: receiver.receive(pipe),
        "prove": receiver.prove,
        "copy": receiver.copy,
        "download": receiver.download,
        "hash": receiver.hash,
    }
    pipe.send(Answer(None, 0.0))
    while True:
        command, *arguments = pipe.recv()
        start_s = time.process_time()
        try:
            value = commands[command](*arguments)
        except Exception as error:
            pipe.send(repr(error))
            raise
        pipe.send(Answer(value, time.process_time() - start_s))


class Parameters(nn.Module):
    """A model that has nothing but the given weights."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self._weights.items():
            yield name, nn.Parameter(weight, requires_grad=False)


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
        self._served = ServedWeights(Parameters(self._weights), at_once, lambda: None)
        self._mapped: dict[int, Bytes] = {}  # by inode

    def announce(self, transport: str) -> None:
        """As the trainer tells it at the start."""
        self._served.announce(self._plan.announcements[transport]).result()

    def receive(self, pipe: Connection) -> None:
        """An update: chunks as they are announced, those that wait together in one request."""
        self._served.start().result()
        is_last = False
        while not is_last:
            chunks: list[Any] = []
            while not is_last and len(chunks) < MOST_CHUNKS and (not chunks or pipe.poll()):
                command, *arguments = pipe.recv()
                is_last = command == "end"
                if not is_last:
                    artifact, chunk = arguments
                    chunks.append(chunk)
            if chunks:
                self._served.load(artifact, chunks).result()
        self._served.finish("benchmark").result()

    def prove(self, nonce: bytes, names: Sequence[str]) -> Mapping[str, Sequence[ServedSlice]]:
        """What an endpoint answers to the trainer's question."""
        proof = self._served.prove(nonce, set(names)).result()
        assert not proof.problems, proof.problems
        return proof.slices

    def hash(self) -> None:
        """The same bytes, with nothing but the proof's hash, in one thread."""
        blake3(self._memory.data, key=secrets.token_bytes(NONCE_BYTES)).digest()

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

    def _map(self, path: Path) -> Bytes:
        status = path.stat()
        if status.st_ino not in self._mapped:
            self._mapped[status.st_ino] = map_file(path, status.st_size)
            self._mapped[status.st_ino].max()  # touched
        return self._mapped[status.st_ino]


def at_once(function: Callable[[], None]) -> Future[None]:
    """For ``ServedWeights``: there is no engine that has steps to wait for."""
    done: Future[None] = Future()
    function()
    done.set_result(None)
    return done
