"""``inference.max_inflight: auto`` for one endpoint: measures batches, and chooses for the next."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from easyrl.inference_client.pool.decode_speed import (
    DecodeSpeed,
    TimedResponse,
    decode_terms,
    fit_decode_speed,
    speed_of_sequences,
    tells_step_from_sequence,
)
from easyrl.inference_client.pool.step_time import Lengths, batch_s, fastest

FEWEST = 16  # requests in flight: fewer, and a round trip shows
MIN_GAIN = 0.04  # of the expected time; for less the endpoint is given all that it takes
NUM_WITH_ALL = 2  # batches before fewer are tried, the first of which is slower than others
NUM_TRIED = 5  # batches until a choice, where fewer are tried
DISTURBED = 1.5  # times as long for a token as with more in flight
CHANGE = 2.0  # of lengths or of the trainer's speed, in ...
NUM_CHANGED = 2  # batches in a row, after which all is tried again


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why: as expected of the next batch.

    Attributes:
        expected_s: by limit, seconds from the first request to the end of training.
        lengths: of the samples that this was expected of, by group.
        train_s: seconds of training for a group.
        took_s: by limit that was tried, seconds of such a batch by what one has really taken.
    """

    max_inflight: int
    expected_s: dict[int, float]
    lengths: list[Lengths]
    speed: DecodeSpeed
    train_s: float
    took_s: dict[int, float]

    def __str__(self) -> str:
        lengths = [length for group in self.lengths for length in group]
        mean = sum(lengths) / len(lengths)
        expected, took = (
            ", ".join(f"{s:.3g} s with {n}" for n, s in sorted(seconds.items()))
            for seconds in (self.expected_s, self.took_s)
        )
        return (
            f"{self.max_inflight} requests in flight: {len(lengths)} samples of {mean:.0f} "
            f"tokens are expected to take, trained, {expected} (a decoding step "
            f"{1e3 * self.speed.step_s:.2g} ms and {1e6 * self.speed.sequence_s:.2g} µs a "
            f"sequence, training {1e3 * self.train_s:.3g} ms a group); tried, {took}"
        )


class _Work(NamedTuple):
    """Of a batch."""

    mean_tokens: float  # of a sample
    train_s: float  # of a group; 0: not told


class _Tried(NamedTuple):
    """A batch with one limit."""

    terms: np.ndarray  # ``decode_terms``
    s_per_token: float  # of a response, the mean
    train_s: float
    took_s: float  # a token, from the first request to the end of training


class AdaptiveLimit:
    """Requests that one endpoint is given at a time.

    Consumes: each response with its times, and the end of each batch. Waits for: nothing. Produces:
    a limit for each batch: all that the endpoint takes; then, if fewer could gain ``MIN_GAIN``,
    those, the middle between those and all, and what lies beside the fastest so far; in the end the
    one that has taken least of those that could gain. The model alone is not believed: it does not
    know how much decoding and training are in each other's way. What is sampled does not depend on
    it. Belongs to the pool's loop.
    """

    def __init__(self, most: int) -> None:
        self.most = most  # that the endpoint takes
        self.max_inflight = most
        # of the open batch: by group the responses of each sample, one after the other
        self._responses: dict[Hashable, dict[Hashable, list[TimedResponse]]] = {}
        self._num_batches = 0  # since trying began
        self._tried: dict[int, _Tried] = {}  # the faster batch of each limit
        self._few: int | None = None  # that are tried first; None: fewer gain nothing
        self._chosen_for: _Work | None = None  # None: still trying
        self._num_changed = 0  # batches in a row

    def saw(
        self, group: Hashable, response: TimedResponse, session: Hashable | None = None
    ) -> None:
        """A response of the open batch's ``group``: a sample, or a turn of the ``session``."""
        samples = self._responses.setdefault(group, {})
        samples.setdefault(len(samples) if session is None else session, []).append(response)

    @property
    def num_responses(self) -> int:
        """Of the open batch, so far."""
        groups = self._responses.values()
        return sum(len(sample) for samples in groups for sample in samples.values())

    def forget_batch(self) -> None:
        """What was seen of the open batch does not count."""
        self._responses = {}

    def end_batch(self, train_s: float, now_s: float) -> Choice | None:
        """Finds the next batch's limit; None: as before, or still trying.

        Args:
            now_s: when the batch was trained, by the clock of its responses.
            train_s: seconds that the trainer takes for a whole group of this endpoint's, while the
                other endpoints' groups are trained too; 0: it does not begin before the last group
                is there, or has said nothing yet.
        """
        groups = [list(samples.values()) for samples in self._responses.values()]
        self._responses = {}
        num_samples = sum(map(len, groups))
        limits = self._limits(num_samples)
        if len(limits) == 1:
            return None  # too few for a difference
        responses = [response for group in groups for sample in group for response in sample]
        num_tokens = sum(response.num_tokens for response in responses)
        work = _Work(num_tokens / num_samples, train_s)
        if self._chosen_for is not None:
            if not self._has_changed(work, self._chosen_for):
                return None
            self._num_batches, self._tried, self._chosen_for = 0, {}, None
        self._num_batches += 1
        took_s = sum(response.ended_s - response.began_s for response in responses)
        all_took_s = now_s - min(response.began_s for response in responses)
        self._keep(
            _Tried(decode_terms(responses), took_s / num_tokens, train_s, all_took_s / num_tokens)
        )
        groups.sort(key=lambda group: min(sample[0].began_s for sample in group))
        lengths: list[Lengths] = [
            [sum(response.num_tokens for response in sample) for sample in group]
            for group in groups
        ]
        if self._num_batches < NUM_WITH_ALL:
            self.max_inflight = self.most
            return None
        if self._num_batches == NUM_WITH_ALL:
            self._few = self._promising(limits, lengths)
        if self._few is not None and self._num_batches < NUM_TRIED:
            self.max_inflight = self._next_to_try(self._few, limits, lengths)
            return None
        self._chosen_for = work
        return self._choose(limits, lengths)

    def _keep(self, tried: _Tried) -> None:
        """Of each limit what was fastest: a start, and other work, make a batch slower."""
        before = self._tried.get(self.max_inflight, tried)
        faster = min(tried, before, key=lambda each: each.s_per_token)
        self._tried[self.max_inflight] = faster._replace(
            train_s=min(tried.train_s, before.train_s), took_s=min(tried.took_s, before.took_s)
        )

    def _has_changed(self, work: _Work, before: _Work) -> bool:
        pairs = zip(work, before, strict=True)
        is_other = any(a and b and not 1 / CHANGE < a / b < CHANGE for a, b in pairs)
        self._num_changed = self._num_changed + 1 if is_other else 0
        return self._num_changed == NUM_CHANGED

    def _limits(self, num_samples: int) -> list[int]:
        """Powers of two, and all that it takes; beyond the number of samples all are alike."""
        powers = [2**n for n in range(4, 30) if FEWEST <= 2**n < min(self.most, num_samples)]
        return [*powers, self.most]

    def _promising(self, limits: list[int], lengths: list[Lengths]) -> int | None:
        """Fewer than all that could gain, by what batches with all show; None: none could.

        Where these do not show how much slower few are decoded, a quarter, if it would gain were
        they not slower at all.
        """
        terms = [tried.terms for tried in self._tried.values()]
        if tells_step_from_sequence(terms):
            speed, candidates = fit_decode_speed(terms), limits
        else:
            quarter = max(limits[0], min(sum(map(len, lengths)), self.most) // 4)
            few = max(limit for limit in limits if limit <= quarter)
            speed, candidates = speed_of_sequences(terms), [few, self.most]
        best = fastest(self._expected_s(speed, candidates, lengths), self.most, MIN_GAIN)
        return None if best == self.most else best

    def _next_to_try(self, few: int, limits: list[int], lengths: list[Lengths]) -> int:
        """``few``, the middle between those and all, what was disturbed, a neighbour of the best;
        else ``few`` and all in turn."""
        if few not in self._tried:
            return few
        between = [limit for limit in limits if few < limit < self.most]
        if between and self._tried.keys().isdisjoint(between):
            return between[(len(between) - 1) // 2]
        if (disturbed := self._disturbed()) is not None:
            return disturbed
        best = min(self._tried, key=lambda limit: self._tried[limit].took_s)
        fewer = [limit for limit in limits if limit < best]
        more = [limit for limit in limits if limit > best]
        beside = {*fewer[-1:], *more[:1]} - self._tried.keys()
        if not beside:
            return few if self.max_inflight == self.most else self.most
        expected_s = self._expected_s(self._speed(), limits, lengths)
        return min(beside, key=expected_s.__getitem__)

    def _disturbed(self) -> int | None:
        """A limit whose tokens took longer than those of a larger one: a step of more sequences is
        no faster, so that something else was at work."""
        for limit, tried in self._tried.items():
            with_more = (other for n, other in self._tried.items() if n > limit)
            if any(tried.s_per_token > DISTURBED * other.s_per_token for other in with_more):
                return limit
        return None

    def _choose(self, limits: list[int], lengths: list[Lengths]) -> Choice:
        speed = self._speed()
        limits = sorted({*limits, *self._tried})  # the last batch may have had fewer samples
        expected_s = self._expected_s(speed, limits, lengths)
        num_tokens = sum(map(sum, lengths))
        took_s = {limit: tried.took_s * num_tokens for limit, tried in self._tried.items()}
        enough_s = (1 - MIN_GAIN) * expected_s[self.most]
        gaining = [limit for limit in took_s if expected_s[limit] <= enough_s]
        # all that it takes may not have been tried: a benchmark sets the limits itself
        self.max_inflight = min([*gaining, self.most], key=lambda n: took_s.get(n, math.inf))
        train_s = self._train_s(limits)[self.max_inflight]
        return Choice(self.max_inflight, expected_s, lengths, speed, train_s, took_s)

    def _speed(self) -> DecodeSpeed:
        return fit_decode_speed([tried.terms for tried in self._tried.values()])

    def _expected_s(
        self, speed: DecodeSpeed, limits: list[int], lengths: list[Lengths]
    ) -> dict[int, float]:
        train_s = self._train_s(limits)
        return {n: batch_s(speed.tokens_per_s, lengths, n, train_s[n]) for n in limits}

    def _train_s(self, limits: list[int]) -> dict[int, float]:
        """Seconds for a group: beside decoding, which takes longer with few, training is slower."""
        tried = sorted(self._tried)
        seconds = [self._tried[limit].train_s for limit in tried]
        found = np.interp(np.log(limits), np.log(tried), seconds)
        return dict(zip(limits, map(float, found), strict=True))
