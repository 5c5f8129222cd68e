"""What would shorten a batch: a run's own batches, simulated with twice of one thing.

The rates are calibrated on the batches' timeline, the lengths are those of their responses in the
order of their requests. Twice the training devices take half the time for each token; twice the
places at endpoints take more sequences, each slower by as much as the timeline says.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from easyrl.simulation.calibrate import LEAST_REQUESTS, calibrate, most_in_flight
from easyrl.simulation.pipeline import simulate_batch
from easyrl.simulation.replay import lengths_of
from easyrl.simulation.setting import Rates
from easyrl.timeline.spans import GROUP, REQUEST, BatchSpans, is_rank, spans_of

MORE_TRAINING, MORE_INFERENCE = "training devices", "places at inference endpoints"
WORTH_SAYING = 0.03  # of a batch's time
MOST_BATCHES = 16  # the newest are enough


class Expected(NamedTuple):
    """A batch's seconds: simulated as it was, and with twice of one thing."""

    as_it_was_s: float
    more_training_s: float
    more_inference_s: float

    @property
    def gains(self) -> dict[str, float]:
        """The share of the batch's time that each would save."""
        return {
            MORE_TRAINING: 1 - self.more_training_s / self.as_it_was_s,
            MORE_INFERENCE: 1 - self.more_inference_s / self.as_it_was_s,
        }


def expect(batches: Sequence[BatchSpans], *, synchronous: bool) -> list[Expected]:
    """Of each of the newest batches, of all ranks together.

    Empty if none was trained, or they have too few requests.
    """
    by_number: dict[int, list[BatchSpans]] = {}
    for each in batches:
        by_number.setdefault(each.batch, []).append(each)
    trained = [of_ranks for _, of_ranks in sorted(by_number.items()) if _is_trained(of_ranks)]
    trained = trained[-MOST_BATCHES:]
    groups = [_count(of_ranks, GROUP) for of_ranks in trained]
    requests = [_count(of_ranks, REQUEST) for of_ranks in trained]
    if sum(requests) < LEAST_REQUESTS or not sum(groups):
        return []
    group_size = max(round(sum(requests) / sum(groups)), 1)
    mode: Literal["async", "sync"] = "sync" if synchronous else "async"
    setting = calibrate(
        trained,
        places=most_in_flight(trained),
        batch_size=statistics.mode(groups),
        group_size=group_size,
        mode=mode,
    ).setting
    settings = (
        setting,
        replace(setting, rates=_with_twice_the_training(setting.rates)),
        replace(setting, places=2 * setting.places),
    )
    lengths = [lengths_of(of_ranks, group_size) for of_ranks in trained]
    return [Expected(*(simulate_batch(s, own).step_s for s in settings)) for own in lengths]


def median_gains(expected: Sequence[Expected]) -> dict[str, float]:
    """Of several batches; empty without one."""
    kinds = (MORE_TRAINING, MORE_INFERENCE) if expected else ()
    return {kind: statistics.median(each.gains[kind] for each in expected) for kind in kinds}


def advice(batches: Sequence[BatchSpans], *, synchronous: bool) -> str:
    """One sentence: what the batches are bound by, and what would save how much."""
    gains = median_gains(expect(batches, synchronous=synchronous))
    if not gains:
        return (
            f"the timeline has no trained batch of {LEAST_REQUESTS} requests; there is nothing to "
            "advise"
        )
    training, inference = gains[MORE_TRAINING], gains[MORE_INFERENCE]
    told = (
        f"twice the training devices would save {max(training, 0):.0%} of a batch's time, twice "
        f"the {MORE_INFERENCE} {max(inference, 0):.0%}"
    )
    if max(training, inference) < WORTH_SAYING:
        waits = _waiting(batches)
        return f"neither side holds the other up ({waits:.0%} of the time is waiting): {told}"
    bound = "training-bound" if training >= inference else "inference-bound"
    return f"{bound}: {told}"


def _with_twice_the_training(rates: Rates) -> Rates:
    return replace(
        rates, train_token_s=rates.train_token_s / 2, train_group_s=rates.train_group_s / 2
    )


def _is_trained(of_ranks: Sequence[BatchSpans]) -> bool:
    names = {(s.name, "num_tokens" in s.args) for s in spans_of(of_ranks) if is_rank(s.lane)}
    return ("train", True) in names and _count(of_ranks, REQUEST) > 0


def _count(of_ranks: Sequence[BatchSpans], name: str) -> int:
    return sum(span.name == name for span in spans_of(of_ranks))


def _waiting(batches: Sequence[BatchSpans]) -> float:
    """The share of the trainers' time in which they wait for groups."""
    total_s = sum(batch.end_s - batch.start_s for batch in batches)
    waits_s = sum(
        span.seconds
        for batch in batches
        for span in batch.spans
        if is_rank(span.lane) and span.name == "wait"
    )
    return waits_s / total_s if total_s else 0.0
