"""The folder of a run of many steps that nobody has trained: to see how tools bear its length."""

from __future__ import annotations

import math
import random
from pathlib import Path

import orjson

from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import BatchSpans, Span

NUM_REQUESTS = 256  # of a batch
_BATCH_S = 10.0
_METRICS = (
    "reward/mean",
    "reward/std",
    "response/mean_tokens",
    "response/max_tokens",
    "policy/entropy",
    "policy/clipped",
    "policy/logprob_diff",
    "batch/groups_without_signal",
    "grad_norm",
    "throughput/tokens_per_s_per_device",
    "memory/host_peak_gib",
    "time/step_s",
    "time/wait_s",
    "time/train_s",
)


def write_long_run(folder: Path, *, num_steps: int, num_batches: int, num_endpoints: int) -> None:
    """Metrics of ``num_steps`` steps, and the timeline of the last ``num_batches`` batches."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model: {path: model}\ndata: {files: [prompts.jsonl]}\n"
        "inference: {endpoints: [http://127.0.0.1:1]}\nrewards: [{name: exact}]\n"
    )
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(1, num_steps + 1):
            row = {name: math.log(step) + draw.random() for name in _METRICS}
            file.write(orjson.dumps({"step": step, **row}) + b"\n")
    timeline = TimelineFolder(folder)
    for number in range(num_steps - num_batches, num_steps):
        timeline.write(_batch(number, num_endpoints, draw))


def _batch(number: int, num_endpoints: int, draw: random.Random) -> BatchSpans:
    start_s = 1.7e9 + number * _BATCH_S
    spans, now_s = [], start_s
    for name in ["begin", "wait", *["pack", "train", "wait"] * 40, "check", "step", "sync"]:
        seconds = draw.expovariate(1 / 0.07)
        spans.append(Span("rank 0", name, now_s, now_s + seconds))
        now_s += seconds
    for request in range(NUM_REQUESTS):
        lane = f"endpoint http://host{request % num_endpoints}:8000"
        seconds = min(draw.lognormvariate(0.5, 0.6), 7.0)
        sent_s = start_s + 0.01 * (request // 4)
        spans.append(Span(lane, "request", sent_s, sent_s + seconds, {"response_tokens": 9}))
        scored = {"index": request // 8, "sample": request % 8}
        spans.append(
            Span("producer 0", "reward", sent_s + seconds, sent_s + seconds + 0.01, scored)
        )
    for endpoint in range(num_endpoints):
        lane = f"endpoint http://host{endpoint}:8000"
        spans.append(Span(lane, "push", now_s - 0.2, now_s - 0.1))
        spans.append(Span(lane, "proof", now_s - 0.1, now_s))
    return BatchSpans(number, 0, start_s, now_s, spans)
