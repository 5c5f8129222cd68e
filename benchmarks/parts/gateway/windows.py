"""Windows in which a trainer computes beside sessions of the gateway, a proxy or the server."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.parts.gateway.sessions import Load, Sessions, Turns, Way, sessions
from benchmarks.parts.producer.load import pin_threads
from benchmarks.parts.shared_prompt.sizes import Shape, model_config, random_batch
from benchmarks.parts.shared_prompt.workload import random_policy
from benchmarks.parts.thread_clock import ThreadClock, step_seconds
from easyrl.build.inference import Inference
from easyrl.models.tri_model import TriModel
from easyrl.recipes import GRPO
from easyrl.runtime.garbage import collect_rarely
from easyrl.runtime.machine import usable_cpus

# a steady drift of the machine cancels out
BLOCK: tuple[Way, ...] = ("direct", "gateway", "proxy", "proxy", "gateway", "direct")
SETTLE_S = 2.0  # staggered places have begun
ROW = Shape(64, 4, 32)  # of a micro-batch, tokens
RECIPE = GRPO(kl_coef=0.0)


@dataclass(frozen=True)
class Window:
    """One, with the processor seconds that each role has spent for its turns."""

    way: Way
    step_s: float  # of a micro-batch, median
    turns: Turns
    cpu_s: Mapping[str, float]

    @property
    def gateway_cpu_s(self) -> float:
        """Of what stands between client and server."""
        return sum(self.cpu_s[role] for role in ("gateway", "fetcher", "producer's thread"))


def measure(folder: Path, load: Load, num_blocks: int, window_s: float) -> Iterator[Window]:
    """The main thread has the first core to itself, all else shares the second one."""
    trainer_cpu, other_cpu = usable_cpus()[0], usable_cpus()[-1]
    torch.set_num_threads(1)
    step = micro_batch(folder / "policy")
    with sessions(folder, load) as (inference, of):
        for way in BLOCK[: len(BLOCK) // 2]:  # connections are made, code is loaded
            inference.thread.run(of.run(1.0, way))
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            pin_threads(process.pid, other_cpu)
        os.sched_setaffinity(0, {trainer_cpu})  # this thread only
        collect_rarely()  # as a run does before it trains
        for _ in range(num_blocks):
            for way in BLOCK:
                yield _window(inference, of, step, window_s, way)


def micro_batch(folder: Path) -> Callable[[], None]:
    """Forward and backward of a packed row, as an engine runs it."""
    config = model_config("tiny")
    policy = random_policy(config, folder, dtype=torch.float32, device=torch.device("cpu"))
    row = random_batch(ROW, config.vocab_size).micro_batch
    model = TriModel(
        policy, reference=None, old_policy=None, temperature=1.0, device=torch.device("cpu")
    )

    def step() -> None:
        loss, *_ = model.loss(row, RECIPE, same_pass=True)
        loss.backward()
        policy.zero_grad(set_to_none=True)

    return step


def _window(
    inference: Inference, of: Sessions, step: Callable[[], None], window_s: float, way: Way
) -> Window:
    roles = _Roles(inference)
    running = inference.thread.submit(of.run(SETTLE_S + window_s, way))
    step_seconds(step, SETTLE_S)
    durations_s = step_seconds(step, window_s)
    while not running.done():  # the last sessions have a trainer beside them, too
        step()
    return Window(way, statistics.median(durations_s), running.result(), roles.spent_s())


class _Roles:
    """Processor seconds since it was made, by role."""

    def __init__(self, inference: Inference) -> None:
        assert inference.episodes is not None
        self._thread_id = inference.thread.run(_native_thread_id())
        self._roles: dict[str, psutil.Process] = {}
        for child in psutil.Process().children():
            words = " ".join(child.cmdline())
            for role, word in {
                "gateway": "easyrl.gateway.process",
                "fetcher": "fetcher",
                "client": "host.py",
                "server": "parts.gateway.server",
                "proxy": "parts.gateway.proxy",
            }.items():
                if word in words:
                    self._roles[role] = child
        self._start = self._now()

    def spent_s(self) -> dict[str, float]:
        return {role: now - self._start[role] for role, now in self._now().items()}

    def _now(self) -> dict[str, float]:
        spent = {"producer's thread": ThreadClock.of(self._thread_id).cpu_s}
        for role, process in self._roles.items():
            times = process.cpu_times()
            spent[role] = times.user + times.system
        return spent


async def _native_thread_id() -> int:
    return threading.get_native_id()
