"""``inference.max_inflight: auto`` for one endpoint: measures batches, and chooses for the next."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from easyrl.inference_client.pool.decode_speed import (
    DecodeSpeed,
    TimedResponse,
    decode_terms,
    fit_decode_speed,
)
from easyrl.inference_client.pool.step_time import Lengths, batch_s, fastest

FEWEST = 16  # requests in flight: fewer, and a round trip shows
MIN_GAIN = 0.04  # of the expected time: for less nothing is changed
NUM_KEPT = 4  # batches with each limit: machines are not equally fast all the time
CHANGE = 2.0  # of lengths or of the trainer's speed, in ...
NUM_CHANGED = 2  # batches in a row, after which all is tried again
NUM_TRIED = 3  # batches before the first choice: all that it takes, a quarter, all once more


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why: as expected of the next batch.

    Attributes:
        expected_s: by limit, seconds from the first request to the end of training.
        lengths: of the responses that this was expected of, by group.
        train_s: seconds of training for a group.
    """

    max_inflight: int
    expected_s: dict[int, float]
    lengths: list[Lengths]
    speed: DecodeSpeed
    train_s: float

    def __str__(self) -> str:
        lengths = [length for group in self.lengths for length in group]
        mean = sum(lengths) / len(lengths)
        expected = ", ".join(f"{s:.3g} s with {n}" for n, s in sorted(self.expected_s.items()))
        return (
            f"{self.max_inflight} requests in flight: {len(lengths)} responses of {mean:.0f} "
            f"tokens are expected to take, trained, {expected} (a decoding step "
            f"{1e3 * self.speed.step_s:.2g} ms and {1e6 * self.speed.sequence_s:.2g} µs a "
            f"sequence, training {1e3 * self.train_s:.3g} ms a group)"
        )


_Work = tuple[float, float | None]  # mean tokens of a response, seconds of training for a group


class _Measured(NamedTuple):
    """A batch with one limit."""

    terms: np.ndarray  # ``decode_terms``
    train_s: float | None  # for a group


class AdaptiveLimit:
    """Requests that one endpoint is given at a time.

    Consumes: each response with its times, and the end of each batch. Waits for: nothing. Produces:
    a limit for each batch, always the one with the shortest expected time once all are tried. What
    is sampled does not depend on it. Belongs to the pool's loop.
    """

    def __init__(self, most: int) -> None:
        self.most = most  # that the endpoint takes
        self.max_inflight = most
        self._num_batches = 0
        self._chosen_for: _Work = (0.0, None)
        self._num_changed = 0  # batches in a row
        self._responses: dict[Hashable, list[TimedResponse]] = {}  # of the open batch, by group
        self._measured: defaultdict[int, deque[_Measured]] = defaultdict(
            lambda: deque(maxlen=NUM_KEPT)
        )  # by limit

    def saw(self, group: Hashable, response: TimedResponse) -> None:
        """A response of the open batch's ``group``."""
        self._responses.setdefault(group, []).append(response)

    @property
    def num_responses(self) -> int:
        """Of the open batch, so far."""
        return sum(map(len, self._responses.values()))

    def end_batch(self, train_s: float | None) -> Choice | None:
        """The next batch's limit, from all that was measured; None: as before, or still trying.

        Args:
            train_s: seconds that the trainer takes for a whole group of this endpoint's, while the
                other endpoints' groups are trained too; None: it does not begin before the last
                group is there, or has said nothing yet.
        """
        groups, self._responses = list(self._responses.values()), {}
        num_responses = sum(map(len, groups))
        limits = self._limits(num_responses)
        if len(limits) == 1:
            return None  # too few for a difference
        terms = decode_terms([response for group in groups for response in group])
        groups.sort(key=lambda group: min(response.began_s for response in group))
        lengths = [[response.num_tokens for response in group] for group in groups]
        work = (sum(map(sum, lengths)) / num_responses, train_s)
        self._num_changed = self._num_changed + 1 if self._is_other(work) else 0
        if self._num_changed == NUM_CHANGED:
            self._num_batches = self._num_changed = 0
        if self._num_batches <= 1:
            self._measured.clear()  # also the first batch, which is slower than others
        self._measured[self.max_inflight].append(_Measured(terms, train_s))
        self._num_batches += 1
        if self._num_batches < NUM_TRIED:
            few = max(limits[0], min(num_responses, self.most) // 4)
            self.max_inflight = few if self.max_inflight == self.most else self.most
            return None
        if self._num_batches == NUM_TRIED:
            self._chosen_for = work
        return self._choose(limits, lengths)

    def _is_other(self, work: _Work) -> bool:
        """Than when the limits were tried."""
        if self._num_batches < NUM_TRIED:
            return False
        pairs = zip(work, self._chosen_for, strict=True)
        return any(now and then and not 1 / CHANGE < now / then < CHANGE for now, then in pairs)

    def _limits(self, num_responses: int) -> list[int]:
        """Powers of two, and all that it takes; beyond the number of responses all are alike."""
        powers = [2**n for n in range(4, 30) if FEWEST <= 2**n < min(self.most, num_responses)]
        return [*powers, self.most]

    def _choose(self, limits: list[int], lengths: list[Lengths]) -> Choice | None:
        every = [measured for batches in self._measured.values() for measured in batches]
        speed = fit_decode_speed([measured.terms for measured in every])
        expected_s = {n: batch_s(speed.tokens_per_s, lengths, n, self._train_s(n)) for n in limits}
        chosen = fastest(expected_s, self.max_inflight, MIN_GAIN)
        if chosen == self.max_inflight and self._num_batches > NUM_TRIED:
            return None
        self.max_inflight = chosen
        return Choice(chosen, expected_s, lengths, speed, self._train_s(chosen))

    def _train_s(self, max_inflight: int) -> float:
        """As with the nearest limit that was measured: beside much decoding training is slower."""
        told = {
            limit: [m.train_s for m in batches if m.train_s is not None]
            for limit, batches in self._measured.items()
        }
        nearest = min(
            (limit for limit, seconds in told.items() if seconds),
            key=lambda limit: abs(math.log(limit / max_inflight)),
            default=None,
        )
        return 0.0 if nearest is None else statistics.median(told[nearest])
