"""Processor time of one response, of each process that has to do with it, decoding left out.

``python -m benchmarks.response_cost [--groups 32] [--samples 8] [--batches 12]``

A producer wired by the same code as a run (pool, fetcher, reward worker, event log; the demo's
reward) draws batches from ``easyrl serve``, whose model is random and small: prompts of 20 tokens,
responses of 15 to 40, all of a batch in flight at once. Counted per response: the producer's
process, which is the trainer's in a run; the fetcher; the reward worker; the server without its
decoding. The last line printed is one JSON object.

``--base REV`` measures another revision, checked out beside, too: ``--pairs`` runs of each in
turns, medians, the ratio base over now. About 12 s a run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil

from benchmarks.random_model import write_random_model
from benchmarks.same_as_before import worktree
from easyrl.build.inference import Inference, open_inference, open_scoring
from easyrl.config import Config
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.metrics.event_log import EventLog
from easyrl.runtime.workers.child_process import Child, start_child
from easyrl.schema import Prompt

ROOT = Path(__file__).resolve().parents[1]
NUM_PROMPT_TOKENS = 20
MIN_TOKENS, MAX_TOKENS = 15, 40
VOCABULARY = 24  # the tokenizer's
STOP_TOKENS = [8, 9]  # of the 24, so that a response ends after 12 tokens more on average
VERSION = "default"  # what a server that was just started stamps
ROLES = ("trainer", "fetcher", "worker", "server")
EXPECTED_MS = 0.4


def main() -> None:
    arguments = _parse()
    if arguments.side:
        print(json.dumps(_measure(arguments.groups, arguments.samples, arguments.batches)))
        return
    load = [f"--{name}={getattr(arguments, name)}" for name in ("groups", "samples", "batches")]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        checkouts = {"now": ROOT}
        if arguments.base is not None:
            base = opened.enter_context(worktree(arguments.base, Path(folder) / "checkout"))
            for file in ROOT.glob("benchmarks/response_cost*.py"):  # it may not have them
                shutil.copy(file, base / "benchmarks")
            checkouts["base"] = base
        costs: dict[str, list[dict[str, float]]] = {side: [] for side in checkouts}
        for number in range(arguments.pairs):
            for side in sorted(checkouts, reverse=number % 2 == 1):
                costs[side].append(_run_side(side, load, checkouts[side]))
    print(json.dumps(_summary(costs, arguments.base)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=32, help="of a batch")
    parser.add_argument("--samples", type=int, default=8, help="per group")
    parser.add_argument("--batches", type=int, default=12, help="counted, after two that are not")
    parser.add_argument("--base", metavar="REV", help="this revision too")
    parser.add_argument("--pairs", type=int, default=3, help="of runs")
    parser.add_argument("--side", action="store_true", help="one run, in this process")
    return parser.parse_args()


def _run_side(side: str, load: list[str], checkout: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.response_cost", "--side", *load]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout)
    cost: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    words = ", ".join(f"{name} {value:.3f}" for name, value in cost.items())
    print(f"{side}: ms per response: {words}", flush=True)
    return cost


def _summary(costs: dict[str, list[dict[str, float]]], base: str | None) -> dict[str, object]:
    def medians(side: str) -> dict[str, float]:
        names = costs[side][0]
        return {name: round(statistics.median(c[name] for c in costs[side]), 4) for name in names}

    now = medians("now")
    summary: dict[str, object] = {"ms_per_response": now, "expected_ms": EXPECTED_MS}
    if base is None:
        return summary
    before = medians("base")
    ratios = [b["all"] / n["all"] for b, n in zip(costs["base"], costs["now"], strict=True)]
    return summary | {
        "base": base,
        "base_ms_per_response": before,
        "ratio": round(statistics.median(ratios), 3),
        "pairs": [round(ratio, 3) for ratio in ratios],
    }


# ---- one run -------------------------------------------------------------------------------------


def _measure(num_groups: int, num_samples: int, num_batches: int) -> dict[str, float]:
    """Milliseconds per response: by role, ``all`` of them, and the server's ``decoding``."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _server(Path(folder)) as server,
        _producer(Path(folder), server.url, num_groups, num_samples) as rollouts,
    ):
        for number in range(2):  # processes are started, code is loaded, connections are made
            _draw(rollouts, number, num_groups)
        gc.collect()
        gc.freeze()  # as a run does
        before, num_tokens = _spent_s(server), 0
        for number in range(num_batches):
            num_tokens += _draw(rollouts, 2 + number, num_groups)
        now = _spent_s(server)
    num_responses = num_batches * num_groups * num_samples
    cost = {name: 1e3 * (now[name] - before[name]) / num_responses for name in now}
    return {
        "all": sum(cost[role] for role in ROLES),
        **cost,
        "tokens": num_tokens / num_responses,
    }


@dataclass(frozen=True)
class _Server:
    url: str
    child: Child

    def spent_s(self) -> tuple[float, float]:
        """All, and decoding."""
        self.child.socket.sendall(b"?")
        return msgspec.json.decode(self.child.socket.recv(2**10), type=tuple[float, float])


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[_Server]:
    write_random_model(folder, hidden_size=64, num_layers=2)
    child = start_child("benchmarks.response_cost_server:serve")
    try:
        child.socket.sendall(str(folder).encode())
        yield _Server(child.socket.recv(2**10).decode(), child)
    finally:
        child.end()
        child.socket.close()


@contextlib.contextmanager
def _producer(
    folder: Path, url: str, num_groups: int, num_samples: int
) -> Iterator[RolloutGenerator]:
    config = Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"files": [str(folder / "none.jsonl")]},
            "rollout": {
                "num_generations": num_samples,
                "max_tokens": MAX_TOKENS,
                "min_tokens": MIN_TOKENS,
                "allow_off_policy_sampling": True,
                "stop_token_ids": STOP_TOKENS,
                "queue_size": num_groups,
            },
            "inference": {"endpoints": [url], "max_inflight": num_groups * num_samples},
            "rewards": [{"name": "exact"}],
            "scoring": {"num_workers": 1},
        }
    )
    with ExitStack() as opened:
        events = EventLog(folder / "events.jsonl")
        opened.callback(events.close)
        scoring = open_scoring(config, opened)
        inference = open_inference(
            config, opened, scoring, vocab_size=VOCABULARY, record=events.record
        )
        inference.thread.run(_confirm(inference))
        yield inference.rollouts()


async def _confirm(inference: Inference) -> None:
    for endpoint in inference.pool.endpoints:
        inference.pool.confirm(endpoint, VERSION)


def _draw(rollouts: RolloutGenerator, number: int, num_groups: int) -> int:
    """One batch of groups. Returns the number of tokens."""
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCABULARY, (num_groups, NUM_PROMPT_TOKENS), dtype=np.int32)
    prompts = [Prompt(number * num_groups + i, row, "", "0") for i, row in enumerate(ids)]
    groups = list(rollouts.produce(prompts, VERSION))
    assert len(groups) == num_groups
    return sum(len(made.token_ids) for group in groups for made in group.completions)


def _spent_s(server: _Server) -> dict[str, float]:
    """Processor seconds by role, and of the server's decoding."""
    process_s, decoding_s = server.spent_s()
    spent = dict.fromkeys(ROLES, 0.0)
    spent |= {"server": process_s - decoding_s, "decoding": decoding_s}
    spent["trainer"] = time.process_time()
    for child in psutil.Process().children(recursive=True):
        if child.pid != server.child.process.pid:
            words = " ".join(child.cmdline())
            times = child.cpu_times()
            spent["fetcher" if "fetcher" in words else "worker"] += times.user + times.system
    return spent


if __name__ == "__main__":
    main()
