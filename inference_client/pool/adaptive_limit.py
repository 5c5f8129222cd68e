"""``inference.max_inflight: auto`` for one endpoint: measures batches, and chooses for the next."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from easyrl.inference_client.pool.decode_speed import (
    DecodeSpeed,
    TimedResponse,
    fit_decode_speed,
)
from easyrl.inference_client.pool.step_time import Lengths, batch_s, fastest

FEWEST = 16  # requests in flight: fewer, and a round trip shows
MIN_GAIN = 0.03  # of the expected time: for less nothing is changed
NUM_TRIED = 3  # batches before the first choice: all that it takes, a quarter, all once more (the
# first of a run is slower than others)


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


@dataclass(frozen=True)
class _Measured:
    """The last batch with one limit."""

    responses: list[TimedResponse]
    train_s: float | None


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
        self._responses: dict[Hashable, list[TimedResponse]] = {}  # of the open batch, by group
        self._measured: dict[int, _Measured] = {}  # by limit

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
        everything = [response for group in groups for response in group]
        self._measured[self.max_inflight] = _Measured(everything, train_s)
        self._num_batches += 1
        if self._num_batches < NUM_TRIED:
            wanted = max(limits[0], min(num_responses, self.most) // 4)
            self.max_inflight = limits[-1] if self._num_batches % 2 == 0 else wanted
            return None
        groups.sort(key=lambda group: min(r.began_s for r in group))
        return self._choose(limits, [[r.num_tokens for r in group] for group in groups])

    def _limits(self, num_responses: int) -> list[int]:
        """Powers of two, and all that it takes; beyond the number of responses all are alike."""
        powers = [2**n for n in range(4, 30) if FEWEST <= 2**n < min(self.most, num_responses)]
        return [*powers, self.most]

    def _choose(self, limits: list[int], lengths: list[Lengths]) -> Choice | None:
        speed = fit_decode_speed([m.responses for m in self._measured.values()])
        if speed is None or speed.tokens_per_s(1) <= 0:
            return None
        expected_s = {n: batch_s(speed.tokens_per_s, lengths, n, self._train_s(n)) for n in limits}
        chosen = fastest(expected_s, self.max_inflight, MIN_GAIN)
        if chosen == self.max_inflight and self._num_batches > NUM_TRIED:
            return None
        self.max_inflight = chosen
        return Choice(chosen, expected_s, lengths, speed, self._train_s(chosen))

    def _train_s(self, max_inflight: int) -> float:
        """As measured with the next limit to this: beside much decoding training may be slower."""
        near = [(abs(n / max_inflight - 1), m.train_s) for n, m in self._measured.items()]
        return min((x for x in near if x[1] is not None), default=(0.0, None))[1] or 0.0
