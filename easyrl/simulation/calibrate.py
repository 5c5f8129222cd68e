"""Rates and lengths of a run, from its timeline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from easyrl.simulation.setting import Lengths, Rates, Setting
from easyrl.timeline.chrome_trace import in_flight
from easyrl.timeline.spans import (
    GROUP,
    REQUEST,
    BatchSpans,
    Span,
    by_lane,
    is_endpoint,
    is_environment,
    is_rank,
    rank_lane,
    spans_of,
)

LEAST_REQUESTS = 20


class Calibration(NamedTuple):
    """A run's own setting."""

    setting: Setting
    step_s: float  # measured, the median


def calibrate(
    batches: Sequence[Sequence[BatchSpans]],
    *,
    places: int,
    batch_size: int,
    group_size: int,
    mode: Literal["async", "sync"],
    shares_prompts: bool = True,
    devices_per_endpoint: int = 1,
    devices_per_rank: int = 1,
) -> Calibration:
    """The setting that ``batches``, each with what all ranks have recorded, were made by.

    Each sample is one request: ``has_episodes`` says of which batches that is not so.

    ``places``: requests in flight at an endpoint, the most that a run of this configuration has;
    what the timeline shows is less where a batch does not fill them. Raises ``ValueError`` if there
    is too little to calibrate on.
    """
    requests = [s for of_ranks in batches for s in _spans(of_ranks) if s.name == REQUEST]
    if len(requests) < LEAST_REQUESTS:
        raise ValueError(
            f"the timeline has {len(requests)} requests and {LEAST_REQUESTS} are needed; train a "
            "few batches more, or state the rates"
        )
    tokens = [int(request.args["response_tokens"]) for request in requests]
    rates = _rates(batches, requests, shares_prompts)
    setting = Setting(
        rates,
        Lengths(tuple(tokens), longest=max(tokens)),
        endpoints=statistics.mode(len(_endpoints(of_ranks)) for of_ranks in batches),
        places=places,
        ranks=statistics.mode(len(of_ranks) for of_ranks in batches),
        batch_size=batch_size,
        group_size=group_size,
        prompt_tokens=round(statistics.mean(int(r.args["prompt_tokens"]) for r in requests)),
        mode=mode,
        shares_prompts=shares_prompts,
        updates=statistics.mode(_num_updates(of_ranks) for of_ranks in batches),
        devices_per_endpoint=devices_per_endpoint,
        devices_per_rank=devices_per_rank,
    )
    seconds = [seconds_of(of_ranks) for of_ranks in batches]
    return Calibration(setting, statistics.median(seconds))


def seconds_of(of_ranks: Sequence[BatchSpans]) -> float:
    """From a batch's first phase to the next batch's, of the slowest rank."""
    return max(each.end_s - each.start_s for each in of_ranks)


def has_episodes(batches: Sequence[BatchSpans]) -> bool:
    """Whether samples of theirs were more than one request each, with an environment in between."""
    return any(is_environment(span.lane) for span in spans_of(batches))


def trained_share_of(
    batches: Sequence[Sequence[BatchSpans]], group_size: float, *, shares_prompts: bool
) -> float:
    """The part of the packed tokens that was trained.

    Above 1 where more were than ``shares_prompts`` has it.
    """
    spans = [span for of_ranks in batches for span in _spans(of_ranks)]
    trained = sum(int(s.args.get("num_tokens", 0)) for s in spans if s.name == "train")
    responses_of_a_prompt = group_size if shares_prompts else 1
    packed = sum(
        int(span.args["response_tokens"]) + int(span.args["prompt_tokens"]) / responses_of_a_prompt
        for span in spans
        if span.name == REQUEST
    )
    return trained / packed if packed else 0.0


def most_in_flight(batches: Sequence[Sequence[BatchSpans]]) -> int:
    """Requests that an endpoint had at a time, the most."""
    counts = [
        count
        for of_ranks in batches
        for spans in _endpoints(of_ranks).values()
        for _, count in in_flight(spans)
    ]
    return max(counts, default=1)


def _rates(
    batches: Sequence[Sequence[BatchSpans]], requests: Sequence[Span], shares_prompts: bool
) -> Rates:
    step_s, each_s, prompt_s, request_s = _decode_rates(batches)
    trained = [s for of_ranks in batches for s in _spans(of_ranks) if s.name == "train"]
    trained_tokens = sum(int(span.args.get("num_tokens", 0)) for span in trained)
    if not trained_tokens:
        raise ValueError("the timeline has no trained micro-batch; train a few batches more")
    num_groups = sum(s.name == GROUP for of_ranks in batches for s in _spans(of_ranks))
    group_size = max(len(requests) / max(num_groups, 1), 1)
    scored = [s.seconds for of_ranks in batches for s in _spans(of_ranks) if s.name == "reward"]
    beside = sum(
        span.seconds
        for of_ranks in batches
        for span in _spans(of_ranks)
        if is_rank(span.lane) and span.name == "pack"
    )
    return Rates(
        decode_step_s=step_s,
        decode_each_s=each_s,
        prefill_s=prompt_s,
        request_s=request_s + (statistics.mean(scored) if scored else 0.0),
        train_token_s=sum(span.seconds for span in trained) / trained_tokens,
        train_group_s=beside / max(num_groups, 1),
        trained_share=trained_share_of(batches, group_size, shares_prompts=shares_prompts),
        update_s=statistics.median(_update_s(of_ranks) for of_ranks in batches),
        border_s=statistics.median(_border_s(of_ranks) for of_ranks in batches),
    )


def _decode_rates(batches: Sequence[Sequence[BatchSpans]]) -> tuple[float, ...]:
    """Least squares, none below zero: seconds of a request = tokens · (a + b · mean in flight)
    + prompt tokens · c + d. What the requests do not tell apart is taken as none: c first, b, d."""
    rows, seconds = [], []
    for of_ranks in batches:
        for spans in _endpoints(of_ranks).values():
            times, counts = map(np.array, zip(*in_flight(spans), strict=True))
            area = np.concatenate([[0.0], np.cumsum(np.diff(times) * counts[:-1])])
            for span in spans:
                if span.name != REQUEST or span.seconds <= 0:
                    continue
                start, end = np.interp((span.start_s, span.end_s), times, area)
                tokens = int(span.args["response_tokens"])
                beside = (end - start) / span.seconds
                rows.append([tokens, tokens * beside, int(span.args["prompt_tokens"]), 1.0])
                seconds.append(span.seconds)
    matrix, target = np.array(rows), np.array(seconds)
    scaled = matrix / np.maximum(np.abs(matrix).max(axis=0), 1e-9)
    used = [0, 1, 2, 3]
    for column in (2, 1, 3):
        others = [each for each in used if each != column]
        if _rank(scaled[:, others]) == _rank(scaled[:, used]):
            used = others
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], target, rcond=None)
        if found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    rates = dict(zip(used, found.tolist(), strict=True))
    return tuple(rates.get(column, 0.0) for column in range(4))


def _rank(matrix: np.ndarray) -> int:
    return int(np.linalg.matrix_rank(matrix, tol=1e-6))


def _num_updates(of_ranks: Sequence[BatchSpans]) -> int:
    """Optimizer steps."""
    return max(1, *(len(_phases(each, "step")) for each in of_ranks))


def _update_s(of_ranks: Sequence[BatchSpans]) -> float:
    """What an optimizer step before the last one takes, of the slowest rank; 0 without one."""
    return max(
        sum(statistics.mean(_phases(each, name)[:-1] or [0.0]) for name in ("check", "step"))
        for each in of_ranks
    )


def _phases(batch: BatchSpans, name: str) -> list[float]:
    """Seconds of a rank's phases of one name, in order."""
    return [s.seconds for s in batch.spans if s.lane == rank_lane(batch.rank) and s.name == name]


def _border_s(of_ranks: Sequence[BatchSpans]) -> float:
    """Behind the last micro-batch, and from a batch's begin to its first request."""
    trained = [
        span.end_s
        for each in of_ranks
        for span in each.spans
        if span.lane == rank_lane(each.rank) and span.name == "train"
    ]
    start_s, end_s = min(each.start_s for each in of_ranks), max(each.end_s for each in of_ranks)
    sent = [span.start_s for span in _spans(of_ranks) if span.name == REQUEST]
    before_s = max(min(sent, default=start_s) - start_s, 0.0)
    return before_s + end_s - max(trained, default=end_s)


def _spans(of_ranks: Sequence[BatchSpans]) -> list[Span]:
    start_s = min(each.start_s for each in of_ranks)
    return [span for span in spans_of(of_ranks) if span.end_s > start_s]


def _endpoints(of_ranks: Sequence[BatchSpans]) -> dict[str, list[Span]]:
    """Endpoints with a request of training."""
    lanes = by_lane(_spans(of_ranks))
    return {
        lane: spans
        for lane, spans in lanes.items()
        if is_endpoint(lane) and any(span.name == REQUEST for span in spans)
    }
