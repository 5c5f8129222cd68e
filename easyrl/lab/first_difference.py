"""Where two recorded runs part: the first batch, sample, token and number that are not equal.

A batch is compared in the order in which things come about: the weights that made it, the prompts
it drew and what became of them, what was sampled, how it was scored, what was measured when it was
trained. What differs later may be a consequence; what differs first is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from easyrl.ledger.recorded_run import RecordedRun
from easyrl.runtime.determinism import reproducible
from easyrl.schema import Completion, GroupOutcome, Key, RolloutGroup, Score, comparable


@dataclass(frozen=True)
class Difference:
    """One thing that is not equal, and where it is."""

    what: str  # "weights", "prompts", "sampled tokens", "log-probabilities", "rewards", …
    one: Any  # in the first run; None: not there
    other: Any
    batch: int | None = None
    step: int | None = None  # optimizer steps up to the end of the batch
    prompt: Key | None = None  # epoch and index
    sample: int | None = None  # of the group, from 0
    token: int | None = None  # of the response, or of the prompt, from 0
    name: str | None = None  # of a metric, or of a part of the reward


@dataclass
class Compared:
    """What was looked at up to the first difference, and that."""

    difference: Difference | None = None
    num_batches: int = 0  # equal ones
    num_groups: int = 0  # compared token by token, all equal but for the difference
    num_tokens: int = 0  # sampled ones of these
    not_journalled: list[int] = field(default_factory=list)  # batches without their tokens


class RunsDiffer(ValueError):
    """Two runs that have nothing in common that could be compared; the message says why."""


def first_difference(one: RecordedRun, other: RecordedRun, tolerance: float = 0.0) -> Compared:
    """Compares two runs batch by batch, up to the end of the shorter one.

    Args:
        tolerance: numbers are equal up to it, in shares of the larger of the two. Tokens, prompts
            and weights are equal or are not; with a tolerance, weights are not compared.

    Raises ``RunsDiffer`` if the runs do not draw from the same data, and ``ValueError`` for a
    journal that is not as it was written.
    """
    if one.run.data != other.run.data:
        raise RunsDiffer(
            f"{one.folder} and {other.folder} are runs on other data: their prompts cannot be told "
            "to be the same; compare runs with the same data.* settings"
        )
    found = Compared()
    for v in range(min(one.num_batches, other.num_batches)):
        found.difference = next(_in_batch(one, other, v, tolerance, found), None)
        if found.difference is not None:
            return found
        found.num_batches += 1
    found.difference = _behind(one, other, tolerance)
    return found


def _in_batch(
    one: RecordedRun, other: RecordedRun, v: int, tolerance: float, found: Compared
) -> Iterator[Difference]:
    """The differences of batch ``v``, in order; most of them are never asked for."""
    a, b = one.batch(v), other.batch(v)
    place: dict[str, Any] = {"batch": v, "step": a.step}
    if tolerance == 0 and comparable(a.weights, b.weights) and a.weights != b.weights:
        yield Difference("weights", a.weights, b.weights, **place)
    yield from _in_membership(a.groups, b.groups, place)
    yield from _in_groups(one, other, v, tolerance, found, place)
    ours, theirs = (reproducible(run.metrics_of(v)) for run in (one, other))
    for name, x, y in _in_numbers(ours, theirs, tolerance):
        yield Difference("metrics", x, y, name=name, **place)


def _in_membership(
    ours: list[GroupOutcome], theirs: list[GroupOutcome], place: Mapping[str, Any]
) -> Iterator[Difference]:
    for a, b in zip(ours, theirs, strict=False):
        if a.key != b.key:
            yield Difference("prompts", a.key, b.key, **place)
        if (a.outcome, a.update) != (b.outcome, b.update):
            one, other = (f"{each.outcome} in update {each.update}" for each in (a, b))
            yield Difference("outcome", one, other, prompt=a.key, **place)
    if len(ours) != len(theirs):
        yield Difference("number of prompts", len(ours), len(theirs), **place)


def _in_groups(
    one: RecordedRun,
    other: RecordedRun,
    v: int,
    tolerance: float,
    found: Compared,
    place: Mapping[str, Any],
) -> Iterator[Difference]:
    accepted = [group.key for group in one.batch(v).groups if group.accepted]
    try:
        one.require_journal(v, v)
        other.require_journal(v, v)
    except ValueError:
        found.not_journalled.append(v)
        return
    ours, theirs = (run.groups(v, frozenset(accepted)) for run in (one, other))
    for key in accepted:
        found.num_groups += 1
        found.num_tokens += sum(len(c.sampled_ids) for c in ours[key].completions)
        yield from _in_group(ours[key], theirs[key], tolerance, {**place, "prompt": key})


def _in_group(
    one: RolloutGroup, other: RolloutGroup, tolerance: float, place: Mapping[str, Any]
) -> Iterator[Difference]:
    for token, x, y in _in_arrays(one.prompt.token_ids, other.prompt.token_ids):
        yield Difference("prompt tokens", x, y, token=token, **place)
    if len(one.completions) != len(other.completions):
        yield Difference("samples", len(one.completions), len(other.completions), **place)
    pairs = zip(one.completions, other.completions, strict=False)
    for sample, (a, b) in enumerate(pairs):
        yield from _in_completion(a, b, tolerance, {**place, "sample": sample})
    scores = zip(one.scores, other.scores, strict=False)
    for sample, (x, y) in enumerate(scores):
        yield from _in_score(x, y, tolerance, {**place, "sample": sample})


def _in_completion(
    one: Completion, other: Completion, tolerance: float, place: Mapping[str, Any]
) -> Iterator[Difference]:
    for turn, x, y in _in_turns(one, other):
        yield Difference("turns", x, y, name=f"turn {turn}", **place)
    for token, x, y in _in_arrays(one.token_ids, other.token_ids):
        yield Difference("sampled tokens", x, y, token=token, **place)
    for token, x, y in _in_arrays(one.logprobs, other.logprobs, tolerance):
        yield Difference("log-probabilities", x, y, token=token, **place)
    for token, x, y in _in_arrays(one.loss_mask, other.loss_mask):
        yield Difference("trained tokens", x, y, token=token, **place)
    if one.finish_reason != other.finish_reason:
        yield Difference("finish reason", one.finish_reason, other.finish_reason, **place)


def _in_turns(one: Completion, other: Completion) -> Iterator[tuple[int, Any, Any]]:
    """Turns of episodes that are not the same, by number; which endpoint made them aside."""
    ours, theirs = (
        [] if c.episode is None else [list(turn[:5]) for turn in c.episode.turns]
        for c in (one, other)
    )
    for number, (x, y) in enumerate(zip_longest(ours, theirs)):
        if x != y:
            yield number, x, y


def _in_score(
    one: Score, other: Score, tolerance: float, place: Mapping[str, Any]
) -> Iterator[Difference]:
    for name, x, y in _in_numbers(one.components, other.components, tolerance):
        yield Difference("rewards", x, y, name=name, **place)
    if not _equal(one.reward, other.reward, tolerance):
        yield Difference("rewards", one.reward, other.reward, **place)


def _in_arrays(
    one: np.ndarray, other: np.ndarray, tolerance: float = 0.0
) -> Iterator[tuple[int, Any, Any]]:
    """Places at which two arrays [n] and [m] differ; where one ends, the other's has None."""
    length = min(len(one), len(other))
    a, b = one[:length].astype(np.float64), other[:length].astype(np.float64)
    largest = np.maximum(np.abs(a), np.abs(b))
    equal = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= tolerance * largest)
    for place in np.flatnonzero(~equal).tolist():
        yield place, one[place].item(), other[place].item()
    if len(one) != len(other):
        rest = [array[length].item() if len(array) > length else None for array in (one, other)]
        yield length, rest[0], rest[1]


def _in_numbers(
    one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float
) -> Iterator[tuple[str, Any, Any]]:
    """Names whose numbers differ, or that only one has, in the first one's order."""
    for name in [*one, *(name for name in other if name not in one)]:
        x, y = one.get(name), other.get(name)
        if (name in one) != (name in other) or not _equal(x, y, tolerance):
            yield name, x, y


def relative_difference(one: float, other: float) -> float:
    """Of the larger of the two; infinite where one is not finite, 0.0 where both are alike."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    relative = abs(one - other) / max(abs(one), abs(other))
    return relative if math.isfinite(relative) else math.inf


def _equal(one: float | None, other: float | None, tolerance: float) -> bool:
    """``None``: not finite, in a file of metrics."""
    numbers = (math.nan if number is None else number for number in (one, other))
    return relative_difference(*numbers) <= tolerance


def _behind(one: RecordedRun, other: RecordedRun, tolerance: float) -> Difference | None:
    """What differs where all batches that both have are equal."""
    v = min(one.num_batches, other.num_batches)
    ours, theirs = one.weights_before(v), other.weights_before(v)
    if tolerance == 0 and ours and theirs and comparable(ours, theirs) and ours != theirs:
        return Difference("weights", ours, theirs, batch=v)
    if one.num_batches != other.num_batches:
        return Difference("number of batches", one.num_batches, other.num_batches)
    return None
