"""The load that all sides of ``benchmarks.producer`` put on the same scripted servers."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import psutil

from easyrl.runtime.frames import frame
from easyrl.runtime.seeding import sample_seed
from easyrl.runtime.workers.child_process import Child, start_child

NUM_ENDPOINTS = 2
MAX_INFLIGHT = 256  # requests at a time per endpoint
VOCABULARY = 50_000
VERSION = "benchmark:0:1"


@dataclass(frozen=True)
class Load:
    """Groups of responses whose lengths are spread evenly over 0.5 to 1.5 of the mean."""

    num_groups: int
    num_samples: int  # G
    num_prompt_tokens: int
    num_tokens: int  # of a response, mean
    latency_s: float = 0.2  # of a response of mean length, in proportion to its length

    def prompt(self, index: int) -> np.ndarray:
        """int32 [P]"""
        return np.random.default_rng(index).integers(
            0, VOCABULARY, self.num_prompt_tokens, dtype=np.int32
        )

    def seed(self, index: int, sample: int) -> int:
        """Of a request; the servers choose the response by it."""
        return sample_seed(0, 0, index, sample)


@dataclass(frozen=True)
class Server:
    """A scripted endpoint in a process of its own."""

    url: str
    child: Child

    def num_tokens_served(self) -> int:
        self.child.socket.sendall(b"?")
        return int(self.child.socket.recv(64))


@contextlib.contextmanager
def servers(load: Load) -> Iterator[list[Server]]:
    """``NUM_ENDPOINTS`` of them; gone afterwards."""
    started: list[Server] = []
    try:
        for _ in range(NUM_ENDPOINTS):
            child = start_child("benchmarks.parts.producer.server:serve")
            child.socket.sendall(frame(msgspec.json.encode(asdict(load))))
            port = int(child.socket.recv(64))
            started.append(Server(f"http://127.0.0.1:{port}", child))
        yield started
    finally:
        for server in started:
            server.child.kill()
            server.child.socket.close()


def imbalance(endpoints: Sequence[Server]) -> float:
    """Tokens served: max over mean, less one."""
    served = [server.num_tokens_served() for server in endpoints]
    return max(served) / (sum(served) / len(served)) - 1


class CpuMeter:
    """CPU seconds of this process and what it started, the servers left out."""

    def __init__(self, endpoints: Sequence[Server]) -> None:
        self._servers = {server.child.process.pid for server in endpoints}
        self._start = self._now()

    def spent_s(self) -> dict[str, float]:
        """By role: ``trainer`` is this process with all its threads."""
        now = self._now()
        return {role: now[role] - self._start.get(role, 0.0) for role in now}

    def _now(self) -> dict[str, float]:
        times = psutil.Process().cpu_times()
        spent = {"trainer": times.user + times.system, "fetchers": 0.0, "workers": 0.0}
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self._servers:
                role = (
                    "fetchers" if any("fetcher" in word for word in child.cmdline()) else "workers"
                )
                times = child.cpu_times()
                spent[role] += times.user + times.system
        return spent


def peak_mb() -> float:
    """Of this process, since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def pin_threads(pid: int, cpu: int) -> None:
    """All threads that the process has now; those it starts later follow."""
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {cpu})
