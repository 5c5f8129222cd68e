"""The folder of a run of many steps that nobody has trained: to see how tools bear its length."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import orjson

from easyrl.metrics.names import METRICS
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.timeline.accounts_file import FILE, account_batch
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import BatchSpans, Span

GROUP_SIZE = 8
VOCABULARY = 32_000  # token ids of samples are below it
_BATCH_S = 10.0
_KINDS = 8  # of batches, that all others repeat
_PHASES = "begin wait pack look_ahead train check ranks step sync settle report save ledger other"
_OF_FAMILIES = {
    "phase": _PHASES.split(),
    "reward": ["exact", "format"],
    "set": ["aime24", "math500"],
    "samples": ["8"],
    "k": ["8"],
    "alarm": ["entropy_collapse", "truncation"],
    "environment": ["tools"],
}


@dataclass(frozen=True)
class LongRun:
    """How long, and how much of everything."""

    num_steps: int  # of metrics and accounts
    num_batches: int  # the last ones, which the timeline has
    num_endpoints: int
    num_ranks: int = 1
    num_requests: int = 256  # of a batch
    num_failed: int = 0  # requests, of each endpoint in each batch
    num_sample_tokens: int = 0  # of the last step's responses together
    response_tokens: int = 2000  # of each of them


def write_long_run(folder: Path, size: LongRun) -> None:
    """Metrics of each kind that a run has, accounts, the newest timelines, the newest samples."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model: {path: model}\ndata: {files: [prompts.jsonl]}\n"
        "inference: {endpoints: [http://127.0.0.1:1]}\nrewards: [{name: exact}]\n"
    )
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("wb") as file:
        file.writelines(metrics_line(step, draw) for step in range(1, size.num_steps + 1))
    kinds = [_batch(size, draw) for _ in range(min(_KINDS, size.num_batches))]
    first = size.num_steps - size.num_batches
    for number in range(first, size.num_steps):
        write_batch(folder, number, kinds[number % len(kinds)])
    if kinds:
        accounts = [account_batch(of_ranks) for of_ranks in kinds]
        with (folder / "timeline" / FILE).open("wb") as file:
            for number in range(size.num_steps):
                own = msgspec.structs.replace(accounts[number % len(kinds)], batch=number)
                file.write(msgspec.json.encode(own) + b"\n")
    if size.num_sample_tokens:
        write_samples(folder, size.num_steps, size, draw)


def metric_names() -> list[str]:
    """Of all metrics, a few of each family that has no other end than its name."""
    names = []
    for metric in METRICS:
        parts = re.split(r"<(\w+)>", metric.name)
        if set(parts[1::2]) <= set(_OF_FAMILIES):
            choices = [_OF_FAMILIES[part] if at % 2 else [part] for at, part in enumerate(parts)]
            names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return list(dict.fromkeys(names))


_NAMES = metric_names()


def metrics_line(step: int, draw: random.Random) -> bytes:
    """Of one step, for ``metrics.jsonl``."""
    row = {name: math.log(step) + draw.random() for name in _NAMES}
    return orjson.dumps(row | {"step": step}) + b"\n"


def write_batch(folder: Path, number: int, of_ranks: Sequence[BatchSpans]) -> None:
    """Into the timeline, as batch ``number``."""
    timeline = TimelineFolder(folder)
    for spans in of_ranks:
        timeline.write(msgspec.structs.replace(spans, batch=number))


def write_samples(folder: Path, step: int, size: LongRun, draw: random.Random) -> None:
    """Of one step, ``num_sample_tokens`` in four groups."""
    counts = [
        min(size.response_tokens, size.num_sample_tokens - before)
        for before in range(0, size.num_sample_tokens, size.response_tokens)
    ]
    responses = [_response(num_tokens, draw) for num_tokens in counts]
    groups = [
        SampledGroup(
            step,
            0,
            number,
            number,
            f"made-up:0:{step - 1}",
            "drawn",
            [1, 2, 3],
            responses[number::4],
        )
        for number in range(4)
    ]
    SampleFolder(folder).write(step, 0, 1, groups)


def _response(num_tokens: int, draw: random.Random) -> SampledResponse:
    # words of a text are as unequally frequent: few make up most of it
    tokens = [min(int(draw.paretovariate(0.7)), VOCABULARY - 1) for _ in range(num_tokens)]
    return SampledResponse(
        tokens,
        "stop",
        reward=draw.random(),
        token_advantages=[draw.gauss(0, 1) for _ in tokens],
        logprobs=[-draw.expovariate(2) for _ in tokens],
        token_logprob_diffs=[round(draw.gauss(0, 1e-3), 6) for _ in tokens],
    )


def _batch(size: LongRun, draw: random.Random) -> list[BatchSpans]:
    """Of all ranks."""
    start_s = 1.7e9
    shared, end_s = [], start_s
    for spans in (_requests(size, start_s, draw), _failed(size, start_s, draw)):
        shared += spans
    of_ranks = []
    for rank in range(size.num_ranks):
        phases = list(_phases(f"rank {rank}", start_s, draw))
        end_s = max(end_s, phases[-1].end_s)
        of_ranks.append([*phases, *shared[rank :: size.num_ranks]])
    for endpoint in _endpoints(size):
        of_ranks[0] += [
            Span(endpoint, "push", end_s - 0.2, end_s - 0.1),
            Span(endpoint, "proof", end_s - 0.1, end_s),
        ]
    return [BatchSpans(0, rank, start_s, end_s, spans) for rank, spans in enumerate(of_ranks)]


def _phases(lane: str, start_s: float, draw: random.Random) -> Iterator[Span]:
    now_s = start_s
    for name in ["begin", "wait", *["pack", "train", "wait"] * 40, "check", "step", "sync"]:
        seconds = draw.expovariate(1 / 0.07)
        args: dict[str, int | str] = {"num_tokens": 500} if name == "train" else {}
        yield Span(lane, name, now_s, now_s + seconds, args)
        now_s += seconds


def _requests(size: LongRun, start_s: float, draw: random.Random) -> Iterator[Span]:
    """In groups, each with its rewards."""
    endpoints = _endpoints(size)
    for group in range(size.num_requests // GROUP_SIZE):
        sent_s, ends = start_s + 0.04 * group * 256 / size.num_requests, []
        for sample in range(GROUP_SIZE):
            end_s = sent_s + min(draw.lognormvariate(0.5, 0.6), 7.0)
            tokens: dict[str, int | str] = {
                "prompt_tokens": 9,
                "response_tokens": int(100 * (end_s - sent_s)),
            }
            endpoint = endpoints[(group * GROUP_SIZE + sample) % len(endpoints)]
            yield Span(endpoint, "request", sent_s, end_s, tokens)
            scored: dict[str, int | str] = {"index": group, "sample": sample}
            yield Span("producer 0", "reward", end_s, end_s + 0.01, scored)
            ends.append(end_s + 0.01)
        yield Span("producer 0", "group", sent_s, max(ends), {"index": group})


def _failed(size: LongRun, start_s: float, draw: random.Random) -> Iterator[Span]:
    for endpoint in _endpoints(size):
        for _ in range(size.num_failed):
            sent_s = start_s + _BATCH_S * draw.random()
            yield Span(endpoint, "failed request", sent_s, sent_s + 0.03)


def _endpoints(size: LongRun) -> list[str]:
    return [f"endpoint http://host{number}:8000" for number in range(size.num_endpoints)]
