"""What would shorten a batch: its own arrivals and training times, replayed under other numbers.

A batch is replayed as two queues. Groups are generated in the order of their dispatch, as many at
a time as were, each as long as it took; twice the places at endpoints are twice as many at a time.
Group i, which arrives at a(i), takes its share τ of the measured training time, so that training
ends at f(i) = max(f(i-1), a(i)) + τ; in a synchronous run it begins when all have arrived. Twice
the training devices halve τ. What is behind it (step, push, proof) stays as it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from easyrl.timeline.spans import GROUP, BatchSpans, is_rank, rank_lane
from easyrl.timeline.startup import most_at_once

MORE_TRAINING, MORE_INFERENCE = "training devices", "places at inference endpoints"
WORTH_SAYING = 0.03  # of a batch's time


class Replayed(NamedTuple):
    """A batch's seconds, as measured and under other numbers."""

    measured_s: float
    as_it_was_s: float  # replayed with its own numbers: how good the replay is
    more_training_s: float  # with twice the training devices
    more_inference_s: float  # with twice the places

    @property
    def gains(self) -> dict[str, float]:
        """The share of the batch's time that each would save."""
        return {
            MORE_TRAINING: 1 - self.more_training_s / self.as_it_was_s,
            MORE_INFERENCE: 1 - self.more_inference_s / self.as_it_was_s,
        }


def replay_batch(of_rank: BatchSpans, *, synchronous: bool) -> Replayed | None:
    """One rank's batch; None if it has no groups, or was not trained."""
    lane = rank_lane(of_rank.rank)
    groups = [span for span in of_rank.spans if span.name == GROUP]
    trained = [span for span in of_rank.spans if span.lane == lane and span.name == "train"]
    if not groups or not trained:
        return None
    groups.sort(key=lambda group: group.start_s)
    start_s, places = of_rank.start_s, most_at_once(groups)
    work = ("train", "pack", "look_ahead")
    last_s = max(span.end_s for span in trained)
    first_s = min(group.end_s for group in groups)  # what is packed before is none of its work
    training_s = sum(
        span.seconds
        for span in of_rank.spans
        if span.lane == lane and span.name in work and first_s <= span.end_s <= last_s
    )
    rest_s = of_rank.end_s - last_s
    first_turn_s = max(groups[0].start_s - start_s, 0.0)

    def ends(places: int, share_of_training: float) -> float:
        free = [first_turn_s] * places
        arrivals = []
        for group in groups:
            arrivals.append(heapq.heappop(free) + group.seconds)
            heapq.heappush(free, arrivals[-1])
        arrivals.sort()
        each_s = training_s * share_of_training / len(arrivals)
        if synchronous:
            return arrivals[-1] + each_s * len(arrivals) + rest_s
        end_s = 0.0
        for arrival in arrivals:
            end_s = max(end_s, arrival) + each_s
        return end_s + rest_s

    more_training_s, more_inference_s = ends(places, 0.5), ends(2 * places, 1.0)
    return Replayed(of_rank.end_s - start_s, ends(places, 1.0), more_training_s, more_inference_s)


def median_gains(replayed: Sequence[Replayed]) -> dict[str, float]:
    """Of several batches; empty without one."""
    if not replayed:
        return {}
    kinds = replayed[0].gains
    return {kind: median(each.gains[kind] for each in replayed) for kind in kinds}


def advice(batches: Sequence[BatchSpans], *, synchronous: bool) -> str:
    """One sentence: what the batches are bound by, and what would save how much."""
    found = [replay_batch(batch, synchronous=synchronous) for batch in batches]
    gains = median_gains([each for each in found if each is not None])
    if not gains:
        return "no batch of the timeline was trained; there is nothing to advise"
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
