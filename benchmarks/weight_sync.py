"""How fast new weights reach the endpoints: ours, plain memory copies and plain downloads in turn.

``python -m benchmarks.weight_sync [--gb 0.1 0.5 2] [--receivers 1 4] [--repeats 5]``

A trainer process writes random bf16 weights shaped like a transformer's as an artifact; receivers,
a process each with its own copy of all weights, are told of a chunk as soon as it can be read, as
in a run, and put what they have verified into their weights. The clock runs from the moment the
trainer begins to write to the moment the last receiver has everything (``gb_per_s``), and once more
for a complete artifact (``receive_gb_per_s``). Beside it, by the same processes: a copy of the same
bytes from shared memory into their weights (``memcpy_gb_per_s``), and a download of the same files
with a plain client from a plain server, aiohttp's, which sends files from the kernel
(``http_gb_per_s``). All are bytes per second and receiver, medians over repeats that take turns,
after a warm-up in which the memory that later versions reuse is taken from the system. Every
process stays on one core. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.parts.weight_receivers import Plan, receive_weights
from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.artifact import Chunk, remove_artifact, write_artifact
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from easyrl.inference_client.transfer.keyed_hasher import KeyedHasher
from easyrl.runtime.machine import pin_process, usable_cpus

VOCAB_SIZE = 32_000
HIDDEN_SIZES = {0.3: 512, 1.0: 1024, float("inf"): 2048}  # up to so many GB
NUM_WARM_UPS = 5  # versions until both sides have all the memory they will use
ANSWER_TIMEOUT_S = 120.0


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    cpus = usable_cpus()
    pin_process(0, cpus[:1])
    rows = []
    for gb in arguments.gb:
        weights = random_weights(int(gb * 1e9))
        for receivers in arguments.receivers:
            with Measurement(weights, receivers, arguments.chunk_mb * 2**20, cpus) as measurement:
                for transport in ("file", "http"):
                    row = {"gb": gb, "transport": transport, "receivers": receivers}
                    row |= measurement.row(transport, arguments.repeats)
                    rows.append(row)
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print(json.dumps({"rows": rows}))


def random_weights(num_bytes: int) -> dict[str, Tensor]:
    """bf16, names and shapes as of a tied decoder with grouped queries, ``num_bytes`` in all."""
    hidden = next(size for limit, size in HIDDEN_SIZES.items() if num_bytes <= limit * 1e9)
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden)}
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (3 * hidden, hidden),
        "mlp.up_proj": (3 * hidden, hidden),
        "mlp.down_proj": (hidden, 3 * hidden),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    left, index = num_bytes // 2, 0
    while left > 0:
        for name, shape in shapes.items():
            numel = min(left, torch.Size(shape).numel())
            if numel < torch.Size(shape).numel():
                shape = (numel,)  # the last one takes what is left
            bits = torch.randint(0, 0x3F00, shape, dtype=torch.int16, generator=generator)
            weights[name] = bits.view(torch.bfloat16)
            left -= numel
            if left == 0:
                break
        shapes = {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        index += 1
    return weights


class Measurement:
    """The trainer's side, and ``num_receivers`` processes that stay for all repeats."""

    def __init__(
        self, weights: dict[str, Tensor], num_receivers: int, chunk_bytes: int, cpus: list[int]
    ) -> None:
        self._weights = weights
        self._num_bytes = sum(weight.nbytes for weight in weights.values())
        self._chunk_bytes = chunk_bytes
        self._version = 0
        self._chunks: list[Chunk] = []  # of that version
        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="easyrl-weight-sync-", dir=SHARED_MEMORY))
            stack.callback(shutil.rmtree, folder)
            self._told = Announcement(folder / "easyrl-benchmark", "benchmark")
            server = stack.enter_context(closing(ChunkServer(self._told.root, self._told.token)))
            pin_process(server.pid, cpus[:1])
            plain_url = stack.enter_context(plain_file_server(self._told.root, cpus[:1]))
            shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
            told = {name: self._told.init_info(name, server.url) for name in ("file", "http")}
            plan = Plan(shapes, told, str(self._told.root), plain_url)
            self._pipes = [
                stack.enter_context(receiver_process(plan, cpus[(index + 1) % len(cpus)]))
                for index in range(num_receivers)
            ]
            self._stack = stack.pop_all()

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def row(self, transport: str, repeats: int) -> dict[str, float]:
        """Medians in GB/s; each repeat does one of everything."""
        ways: dict[str, Callable[[], float]] = {
            "gb_per_s": lambda: self._sync(transport),
            "memcpy_gb_per_s": lambda: self._all("copy"),
            "http_gb_per_s": lambda: self._all("download"),
            "receive_gb_per_s": lambda: self._receive(transport),
        }
        for _ in range(NUM_WARM_UPS):
            self._sync(transport)
        for way in ways.values():
            way()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                seconds[name].append(way())
        return {
            name: round(self._num_bytes / statistics.median(values) / 1e9, 3)
            for name, values in seconds.items()
        }

    @property
    def _name(self) -> str:
        return f"v{self._version}"

    def _sync(self, transport: str) -> float:
        """From the first byte written to the last received."""
        old, self._version = self._name, self._version + 1
        name = self._name

        def tell(chunk: Chunk) -> None:
            self._send("chunk", transport, name, chunk.describe())

        start = time.perf_counter()
        with closing(KeyedHasher(secrets.token_bytes(32))) as keyed:  # as a run that proves
            self._chunks = write_artifact(
                self._weights.items(),
                self._told.root / name,
                name,
                self._chunk_bytes,
                on_chunk=tell,
                memory=self._told.memory,
                keyed=keyed,
            )
        self._send("end")
        self._wait()
        elapsed = time.perf_counter() - start
        remove_artifact(self._told.root / old, self._told.memory)
        return elapsed

    def _receive(self, transport: str) -> float:
        """A complete artifact, as after a restart."""
        start = time.perf_counter()
        for chunk in self._chunks:
            self._send("chunk", transport, self._name, chunk.describe())
        self._send("end")
        self._wait()
        return time.perf_counter() - start

    def _all(self, command: str) -> float:
        files = [f"{self._name}/{chunk.file}" for chunk in self._chunks]
        start = time.perf_counter()
        self._send(command, files)
        self._wait()
        return time.perf_counter() - start

    def _send(self, *message: object) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _wait(self) -> None:
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_TIMEOUT_S):
                sys.exit("a receiver does not answer")
            if (problem := pipe.recv()) is not None:
                sys.exit(f"a receiver failed: {problem}")


@contextmanager
def receiver_process(plan: Plan, cpu: int) -> Iterator[Connection]:
    """Answers each command with None, or with what went wrong."""
    context = get_context("spawn")
    pipe, remote = context.Pipe()
    process = context.Process(target=receive_weights, args=(remote, plan, cpu), daemon=True)
    process.start()
    remote.close()
    try:
        pipe.recv()
        yield pipe
    finally:
        process.kill()
        process.join()


PLAIN_SERVER = """
import sys
from aiohttp import web
app = web.Application()
app.router.add_static("/", sys.argv[1])
runner = web.AppRunner(app, access_log=None)
async def start():
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
import asyncio
loop = asyncio.new_event_loop()
loop.run_until_complete(start())
loop.run_forever()
"""


@contextmanager
def plain_file_server(root: Path, cpus: list[int]) -> Iterator[str]:
    """aiohttp's static files; gives the URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", PLAIN_SERVER, str(root)], stdout=subprocess.PIPE, env=os.environ
    )
    try:
        pin_process(process.pid, cpus)
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().decode().strip()}"
    finally:
        process.kill()
        process.wait()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 0.5, 2.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk-mb", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    main()
