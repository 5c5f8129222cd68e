"""Packed rows on a CPU: by a thread each, or one after the other with all threads.

``python -m benchmarks.row_threads [--repeats 15]``

Forward and backward of as many rows as there are cores, of the lengths of three workloads of
``benchmarks.end_to_end`` and a model of their size: one after the other with one thread, one after
the other with all, and a thread each (``easyrl/engines/deepspeed/row_threads.py``), in turns.
Wall clock and processor time in ms, medians; ``ratio`` is the median of what a turn with all
threads takes over its turn with a thread each, at most (``bound``) that of one thread over all rows
divided by the cores. ``same_bits``: the gradients are those of one thread. The last line printed is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.parts.made_up_group import made_up_group
from benchmarks.parts.random_model import write_random_model
from benchmarks.parts.scratch import scratch
from easyrl.config import ModelConfig
from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.engines.deepspeed.row_threads import RowThreads
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel
from easyrl.recipes import GRPO, RunSettings
from easyrl.recipes.groups import trained_group
from easyrl.runtime.machine import usable_cpus
from easyrl.schema import MicroBatch

RECIPE = GRPO(kl_coef=0.0)
DIGITS = 10  # token ids of prompts and responses


@dataclass(frozen=True)
class Load:
    """A row: so many groups of 8 responses, half as long to as long as said."""

    num_layers: int
    groups: int
    prompt: int
    response: int

    def row(self, seed: int) -> MicroBatch:
        rng = np.random.default_rng(seed)
        run = RunSettings(self.response, 8, temperature=1.0, seed=0)
        trained = []
        for index in range(self.groups):
            lengths = rng.integers(self.response // 2, self.response + 1, 8)
            responses = [rng.integers(0, DIGITS, n, dtype=np.int32) for n in lengths]
            group = made_up_group(index, rng.integers(0, DIGITS, self.prompt), responses)
            advantages = rng.normal(size=8).astype(np.float32)
            trained.append(trained_group(RECIPE, group, advantages, run))
        (row,) = pack_groups(trained, max_tokens_per_micro_batch=10**6)
        return row


LOADS = {
    "short": Load(num_layers=2, groups=12, prompt=14, response=25),
    "long tail": Load(num_layers=4, groups=1, prompt=64, response=200),
    "long prompt": Load(num_layers=4, groups=1, prompt=1024, response=64),
}


class Rows:
    """A load's rows, and the ways to train them; ``num`` rows, threads and cores."""

    def __init__(self, load: Load, folder: Path, num: int) -> None:
        model = write_random_model(folder, hidden_size=128, num_layers=load.num_layers)
        self.policy: PolicyModel = load_policy_model(ModelConfig(path=model, dtype="fp32"))
        self.rows, self._num = [load.row(seed) for seed in range(num)], num
        tri_model = TriModel(
            self.policy,
            reference=None,
            old_policy=None,
            temperature=1.0,
            device=torch.device("cpu"),
        )
        self._threads = RowThreads(tri_model, self.policy)

    def train(self, num_threads: int, *, together: bool) -> None:
        torch.set_num_threads(num_threads)
        calls = [self.rows] if together else [[row] for row in self.rows]
        for rows in calls:
            with closing(self._threads.losses(rows, RECIPE, same_pass=True)) as losses:
                for loss, _ in losses:
                    loss.backward()

    def sides(self) -> dict[str, Callable[[], None]]:
        return {
            "one": lambda: self.train(1, together=False),
            "all": lambda: self.train(self._num, together=False),
            "each": lambda: self.train(self._num, together=True),
        }

    def gradients(self, train: Callable[[], None]) -> list[torch.Tensor]:
        self.policy.zero_grad(set_to_none=True)
        train()
        return [p.grad.clone() for p in self.policy.parameters() if p.grad is not None]


def measure(name: str, folder: Path, num: int, repeats: int) -> dict[str, object]:
    """A line of the table."""
    rows = Rows(LOADS[name], folder, num)
    sides = rows.sides()
    for train in sides.values():
        train()
    one, each = (rows.gradients(sides[side]) for side in ("one", "each"))
    wall: dict[str, list[float]] = {side: [] for side in sides}
    spent: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, train in sides.items():
            start_s, processor_s = time.perf_counter(), time.process_time()
            train()
            wall[side].append(1e3 * (time.perf_counter() - start_s))
            spent[side].append(1e3 * (time.process_time() - processor_s))
    return {
        "workload": name,
        "tokens": [row.num_tokens for row in rows.rows],
        "ms": {side: round(statistics.median(times), 1) for side, times in wall.items()},
        "processor_ms": {side: round(statistics.median(times), 1) for side, times in spent.items()},
        "ratio": _ratio(wall["all"], wall["each"]),
        "bound": round(num * _ratio(wall["all"], wall["one"]), 2),
        "same_bits": all(map(torch.equal, one, each)),
    }


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    num, lines = len(usable_cpus()), []
    with scratch("row-threads", keep=False) as made:
        for name in LOADS:
            lines.append(measure(name, made.folder / name, num, repeats))
            print(json.dumps(lines[-1]), flush=True)
    print(json.dumps({"rows": lines}))
    return 0 if all(line["same_bits"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
