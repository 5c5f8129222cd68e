"""One run of ``benchmarks.response_cost``: what the processes spend on a load, by their own clocks.

``python -m benchmarks.parts.response_cost.side MODEL GROUPS SAMPLES BATCHES MAX_INFLIGHT``. Runs in
the checkout of another revision too: it imports nothing else of ``benchmarks``.
"""

from __future__ import annotations

import contextlib
import gc
import json
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

from easyrl.build.inference import Inference, open_inference, open_scoring
from easyrl.completion_check import Vocabulary
from easyrl.config import Config
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.metrics.event_log import EventLog
from easyrl.runtime.workers.child_process import Child, start_child
from easyrl.schema import Prompt

NUM_PROMPT_TOKENS = 20
MIN_TOKENS, MAX_TOKENS = 15, 40
VOCABULARY = 24  # the tokenizer's
STOP_TOKENS = [8, 9]  # of the 24, so that a response ends after 12 tokens more on average
VERSION = "default"  # what a server that was just started stamps
ROLES = ("trainer", "fetcher", "worker", "server")


def main() -> None:
    model, *load = sys.argv[1:]
    print(json.dumps(measure(Path(model), *map(int, load))))


def measure(
    model: Path, num_groups: int, num_samples: int, num_batches: int, max_inflight: int
) -> dict[str, float]:
    """Milliseconds per response: by role, ``all`` of them, and the server's ``decoding``."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _server(model) as server,
        _producer(
            model, Path(folder), server.url, num_groups, num_samples, max_inflight
        ) as rollouts,
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
def _server(model: Path) -> Iterator[_Server]:
    child = start_child("benchmarks.parts.response_cost.server:serve")
    try:
        child.socket.sendall(str(model).encode())
        yield _Server(child.socket.recv(2**10).decode(), child)
    finally:
        child.end()
        child.socket.close()


@contextlib.contextmanager
def _producer(
    model: Path, folder: Path, url: str, num_groups: int, num_samples: int, max_inflight: int
) -> Iterator[RolloutGenerator]:
    config = Config.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"files": [str(folder / "none.jsonl")]},
            "rollout": {
                "num_generations": num_samples,
                "max_tokens": MAX_TOKENS,
                "min_tokens": MIN_TOKENS,
                "allow_off_policy_sampling": True,
                "stop_token_ids": STOP_TOKENS,
                "queue_size": num_groups,
            },
            "inference": {"endpoints": [url], "max_inflight": max_inflight},
            "rewards": [{"name": "exact"}],
            "scoring": {"num_workers": 1},
        }
    )
    with ExitStack() as opened:
        events = EventLog(folder / "events.jsonl")
        opened.callback(events.close)
        scoring = open_scoring(config, opened)
        inference = open_inference(
            config, opened, scoring, vocabulary=Vocabulary(VOCABULARY), record=events.record
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
