"""How fast new weights reach the endpoints: ours, plain memory copies and plain downloads in turn.

``python -m benchmarks.weight_sync [--gb 0.1 0.5 2] [--receivers 1 4] [--repeats 5] [--file]``

A trainer process writes random bf16 weights shaped like a transformer's as an artifact; receivers,
a process each with its own copy of all weights, are told of a chunk as soon as it can be read, as
in a run, put them into their weights as the embedded server does, and prove what they then have.
The clock runs from the trainer's first byte to the last right proof (``gb_per_s``), and once more
for a complete artifact and a nonce of its own, as after a restart (``receive_gb_per_s``). Beside
it, by the same processes: a copy of the same bytes from shared memory into their weights
(``memcpy_gb_per_s``), and a download of the same files with a plain client from a plain server,
aiohttp's, which sends files from the kernel (``http_gb_per_s``). All are bytes per second and
receiver, medians over repeats that take turns, after a warm-up in which the memory that later
versions reuse is taken from the system. All processes share the same ``CORES`` cores.

``bound`` is what ``gb_per_s`` cannot exceed, as a share of ``memcpy_gb_per_s``: one copy and one
hash of every byte, at the trainer and at each receiver, over ``CORES`` cores; ``of_bound`` is what
is reached of it. ``bound_two_hashes`` counts the trainer's second hash too: the weights' identity
in the certificate and the digest of the proof are two. A copy and a hash cost what they cost the
receivers' processors in the same run. ``core_s`` and ``core_s_bound`` are core-seconds of all
processes per sync, and of the bound with two hashes, which other load on the machine disturbs less
than time. The last line printed is one JSON object.
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
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parts.weight_receivers import Plan, receive_weights
from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.transfer.announcement import Announcement
from easyrl.inference_client.transfer.artifact import Chunk, remove_artifact, write_artifact
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader
from easyrl.inference_client.transfer.chunk_server import ChunkServer
from easyrl.inference_client.transfer.keyed_hasher import KeyedHasher
from easyrl.runtime.machine import pin_process, usable_cpus
from easyrl.weight_sync.challenge import NONCE_BYTES, Challenge, shapes_of

VOCAB_SIZE = 32_000
HIDDEN_SIZES = {0.3: 512, 1.0: 1024, float("inf"): 2048}  # up to so many GB
CORES = 2
NUM_WARM_UPS = 5  # versions until both sides have all the memory they will use
ANSWER_TIMEOUT_S = 120.0


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    pin_process(0, usable_cpus()[:CORES])
    transports = ["file"] if arguments.file else ["file", "http"]
    rows = []
    for gb in arguments.gb:
        weights = random_weights(int(gb * 1e9))
        for receivers in arguments.receivers:
            with Measurement(weights, receivers, arguments.chunk_mb * 2**20) as measurement:
                for transport in transports:
                    row: dict[str, Any] = {"gb": gb, "transport": transport, "receivers": receivers}
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

    def __init__(self, weights: dict[str, Tensor], num_receivers: int, chunk_bytes: int) -> None:
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
            plain_url = stack.enter_context(plain_file_server(self._told.root))
            shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
            told = {name: self._told.init_info(name, server.url) for name in ("file", "http")}
            plan = Plan(shapes, told, str(self._told.root), plain_url)
            self._pipes = [
                stack.enter_context(receiver_process(plan)) for _ in range(num_receivers)
            ]
            self._stack = stack.pop_all()

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def row(self, transport: str, repeats: int) -> dict[str, float]:
        """Medians in GB/s; each repeat does one of everything."""
        self._receivers("announce", transport)
        ways: dict[str, Callable[[], Cost]] = {
            "gb_per_s": self._sync,
            "memcpy_gb_per_s": lambda: self._all("copy", self._files()),
            "http_gb_per_s": lambda: self._all("download", self._files()),
            "receive_gb_per_s": self._receive,
            "hash_gb_per_s": lambda: self._all("hash"),
        }
        for _ in range(NUM_WARM_UPS):
            self._sync()
        for way in ways.values():
            way()
        costs: dict[str, list[Cost]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                costs[name].append(way())
        speeds = {
            name: self._num_bytes / statistics.median(cost.seconds for cost in values) / 1e9
            for name, values in costs.items()
        }
        core_s = {
            name: statistics.median(cost.core_s for cost in values)
            for name, values in costs.items()
        }
        receivers = len(self._pipes)
        hash_s = core_s["hash_gb_per_s"] / receivers
        once = (1 + receivers) * (core_s["memcpy_gb_per_s"] / receivers + hash_s)
        bound = self._num_bytes / (once / CORES) / 1e9
        bound_two = self._num_bytes / ((once + hash_s) / CORES) / 1e9
        del speeds["hash_gb_per_s"]
        found = speeds | {
            "bound": bound / speeds["memcpy_gb_per_s"],
            "of_bound": speeds["gb_per_s"] / bound,
            "bound_two_hashes": bound_two / speeds["memcpy_gb_per_s"],
            "of_bound_two_hashes": speeds["gb_per_s"] / bound_two,
            "core_s": core_s["gb_per_s"],
            "core_s_bound": once + hash_s,
        }
        return {name: round(value, 3) for name, value in found.items()}

    @property
    def _name(self) -> str:
        return f"v{self._version}"

    def _files(self) -> list[str]:
        return [f"{self._name}/{chunk.file}" for chunk in self._chunks]

    def _sync(self) -> Cost:
        """From the first byte written to the last receiver's proof."""
        old, self._version = self._name, self._version + 1
        name = self._name
        challenge = Challenge({}, nonce=secrets.token_bytes(NONCE_BYTES))

        def work() -> float:
            self._send("receive")
            with closing(KeyedHasher(challenge.nonce)) as keyed:
                self._chunks = write_artifact(
                    self._weights.items(),
                    self._told.root / name,
                    name,
                    self._chunk_bytes,
                    on_chunk=lambda chunk: self._send(
                        "chunk", name, chunk.describe(proof_follows=True)
                    ),
                    memory=self._told.memory,
                    keyed=keyed,
                )
            self._send("end")
            challenge.tensors = shapes_of(self._chunks)
            challenge.learn(keyed.digests)
            return self._wait() + self._prove(challenge)

        cost = measured(work)
        remove_artifact(self._told.root / old, self._told.memory)
        return cost

    def _receive(self) -> Cost:
        """A complete artifact, as after a restart."""

        def work() -> float:
            self._send("receive")
            for chunk in self._chunks:
                self._tell(self._name, chunk)
            self._send("end")
            reader = ArtifactReader(self._told.root / self._name, self._chunks)
            return self._wait() + self._prove(Challenge(shapes_of(self._chunks), reader))

        return measured(work)

    def _prove(self, challenge: Challenge) -> float:
        """All receivers are asked at once; core-seconds of their answers."""
        self._send("prove", challenge.nonce, list(challenge.tensors))
        core_s = 0.0
        for pipe in self._pipes:
            slices, seconds = self._answer(pipe)
            core_s += seconds
            findings = challenge.check([WorkerProof(slices, {}, "")])
            if findings.wrong[0] or findings.uncovered:
                sys.exit(f"a receiver proved other weights: {findings}")
        return core_s

    def _receivers(self, command: str, *arguments: object) -> float:
        self._send(command, *arguments)
        return self._wait()

    def _all(self, command: str, *arguments: object) -> Cost:
        return measured(lambda: self._receivers(command, *arguments))

    def _tell(self, artifact: str, chunk: Chunk) -> None:
        self._send("chunk", artifact, chunk.describe(proof_follows=True))

    def _send(self, *message: object) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _wait(self) -> float:
        """Until all have done what they were told; core-seconds that it took them."""
        return sum(self._answer(pipe)[1] for pipe in self._pipes)

    def _answer(self, pipe: Connection) -> tuple[Any, float]:
        if not pipe.poll(ANSWER_TIMEOUT_S):
            sys.exit("a receiver does not answer")
        answer = pipe.recv()
        if isinstance(answer, str):
            sys.exit(f"a receiver failed: {answer}")
        return answer.value, answer.core_s


@dataclass(frozen=True)
class Cost:
    seconds: float
    core_s: float  # of all processes


def measured(work: Callable[[], float]) -> Cost:
    """``work`` returns core-seconds of other processes; this one's are added."""
    start_s, own_s = time.perf_counter(), time.process_time()
    others_s = work()
    own_s = time.process_time() - own_s
    return Cost(time.perf_counter() - start_s, own_s + others_s)


@contextmanager
def receiver_process(plan: Plan) -> Iterator[Connection]:
    """Answers each command with an ``Answer``, or with what went wrong, in words."""
    context = get_context("spawn")
    pipe, remote = context.Pipe()
    process = context.Process(target=receive_weights, args=(remote, plan), daemon=True)
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
def plain_file_server(root: Path) -> Iterator[str]:
    """aiohttp's static files; gives the URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", PLAIN_SERVER, str(root)], stdout=subprocess.PIPE, env=os.environ
    )
    try:
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
    parser.add_argument("--file", action="store_true", help="shared memory only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
