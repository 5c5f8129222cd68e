"""How much slower a training loop runs with the producer beside it, in the same process."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from benchmarks.parts.producer.load import VERSION, Load, pin_threads, servers
from benchmarks.parts.producer.rollouts import producer, prompts, wait_until_warm
from benchmarks.parts.thread_clock import ThreadClock, step_seconds
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.runtime.machine import usable_cpus

GROUPS_PER_S = 5.0
NUM_SAMPLES = 16
NUM_TOKENS = 1000
LATENCY_S = 5.0  # of 1,000 tokens; a busy server takes longer
BLOCK = (False, True, True, False)  # a steady drift of the machine cancels out
SETTLE_S = 1.0  # after the producer was started or stopped, and its first responses are there

HIDDEN = 128
NUM_LAYERS = 4
SEQUENCE = 256


def measure_slowdown(num_blocks: int, window_s: float) -> dict[str, float]:
    """Blocks of windows without and with the producer; the median of the blocks' ratios.

    The main thread has the first core to itself; the producer's thread, its processes and the
    servers share the second one. What else runs on the first core is not counted.
    """
    trainer_cpu, other_cpu = usable_cpus()[0], usable_cpus()[-1]
    torch.set_num_threads(1)
    inflight = round(GROUPS_PER_S * NUM_SAMPLES * LATENCY_S)
    num_groups = round(GROUPS_PER_S * (2 * SETTLE_S + 2 * LATENCY_S + window_s)) + inflight
    load = Load(num_groups, NUM_SAMPLES, 512, NUM_TOKENS, LATENCY_S)
    step = _training_step()
    with (
        servers(load) as endpoints,
        tempfile.TemporaryDirectory() as folder,
        producer(
            load,
            [endpoint.url for endpoint in endpoints],
            Path(folder),
            max_inflight=inflight // len(endpoints),
        ) as (inference, rollouts),
    ):
        wait_until_warm(load, inference, rollouts)
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            pin_threads(process.pid, other_cpu)
        os.sched_setaffinity(0, {trainer_cpu})  # this thread only
        thread_id = inference.thread.run(_native_thread_id())
        windows = [
            _window(step, window_s, rollouts, load, beside, thread_id)
            for _ in range(num_blocks)
            for beside in BLOCK
        ]
    off = [window for window in windows if not window.beside]
    on = [window for window in windows if window.beside]
    ratios = [
        (on[i].step_s + on[i + 1].step_s) / (off[i].step_s + off[i + 1].step_s)
        for i in range(0, len(on), 2)
    ]
    return {
        "trainer_slowdown": statistics.median(ratios) - 1,
        "step_ms": 1e3 * statistics.median(window.step_s for window in off),
        "trainer_waits_share": statistics.median(window.waiting_share for window in on),
        "producer_thread_share": statistics.median(window.producer_share for window in on),
    }


@dataclass(frozen=True)
class Window:
    beside: bool  # whether the producer was at work
    step_s: float  # median
    waiting_share: float  # of the time: the main thread waited, for the interpreter above all
    producer_share: float  # of a core, taken by the producer's thread


def _window(
    step: Callable[[], None],
    window_s: float,
    rollouts: RolloutGenerator,
    load: Load,
    beside: bool,
    thread_id: int,
) -> Window:
    stream = rollouts.produce(prompts(load), VERSION) if beside else None
    step_seconds(step, SETTLE_S + 1.5 * LATENCY_S if beside else SETTLE_S)
    start_s, trainer, other = time.monotonic(), ThreadClock.of(), ThreadClock.of(thread_id)
    durations_s = step_seconds(step, window_s)
    wall_s = time.monotonic() - start_s
    if stream is not None:
        stream.close()
    now = ThreadClock.of()
    waited_s = wall_s - (now.cpu_s - trainer.cpu_s) - (now.pushed_aside_s - trainer.pushed_aside_s)
    producer_s = ThreadClock.of(thread_id).cpu_s - other.cpu_s
    return Window(beside, statistics.median(durations_s), waited_s / wall_s, producer_s / wall_s)


async def _native_thread_id() -> int:
    return threading.get_native_id()


def _training_step() -> Callable[[], None]:
    """Forward, backward and an optimizer step of a small transformer: many short operations."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, NUM_LAYERS), nn.Linear(HIDDEN, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    inputs = torch.randn(1, SEQUENCE, HIDDEN)
    labels = torch.randint(0, 1000, (SEQUENCE,))

    def step() -> None:
        logits = model(inputs)[0]
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
