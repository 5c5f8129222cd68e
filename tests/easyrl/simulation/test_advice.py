"""Advice against batches that are made with what was advised, by an arithmetic of their own."""

from __future__ import annotations

import msgspec
import pytest

from easyrl.simulation.advice import (
    MORE_ENDPOINTS,
    MORE_INFERENCE,
    MORE_TRAINING,
    advice,
    expect,
)
from easyrl.timeline.spans import BatchSpans, Span
from tests.easyrl.timeline.made_spans import batch, phases

TOKENS = 100


def made(
    places: int,
    train_s: float,
    *,
    num_groups: int = 24,
    token_s: float = 0.02,
    slower_s: float = 0.0,
    synchronous: bool = False,
    score_s: float = 0.0,
    endpoints: int = 1,
    ranks: int = 1,
) -> BatchSpans:
    """Groups of one response through ``places``, in waves; trained one by one; 1 s behind it.

    A token takes ``token_s`` and ``slower_s`` for each response of its endpoint's wave. The last
    wave has what is left.
    """
    spans, arrivals, begin_s = [], [], 0.0
    for first in range(0, num_groups, places * endpoints):
        wave = range(first, min(first + places * endpoints, num_groups))
        for endpoint in range(endpoints):
            own = wave[endpoint::endpoints]
            end_s = begin_s + TOKENS * (token_s + slower_s * len(own))
            args = {"response_tokens": TOKENS, "prompt_tokens": 10}
            for index in own:
                lane = f"endpoint http://{'ab'[endpoint]}:1"
                spans.append(Span(lane, "request", begin_s, end_s, args))
                group = Span("producer 0", "group", begin_s, end_s + score_s, {"index": index})
                spans.append(group)
                if score_s:
                    spans.append(Span("producer 0", "reward", end_s, end_s + score_s))
                arrivals.append(end_s + score_s)
        begin_s += TOKENS * (token_s + slower_s * places)
    free_s = [max(arrivals) if synchronous else 0.0] * ranks
    for arrival_s in sorted(arrivals):
        rank = free_s.index(min(free_s))
        now_s = max(free_s[rank], arrival_s)
        free_s[rank] = now_s + train_s
        told = {"num_tokens": TOKENS + 10}
        spans.append(Span(f"rank {rank}", "train", now_s, now_s + train_s, told))
    spans += phases(("step", 1.0), start_s=max(free_s))
    return batch(spans, max(free_s) + 1.0)


CASES = [(4, 0.1), (4, 0.6), (8, 0.3), (24, 0.4)]


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("slower_s", [0.0, 0.001])
@pytest.mark.parametrize(("places", "train_s"), CASES)
def test_the_gain_is_that_of_a_batch_that_has_taken_the_advice(
    places, train_s, slower_s, synchronous
) -> None:
    shape = {"slower_s": slower_s, "synchronous": synchronous, "num_groups": 30}  # 30: a rest
    before = made(places, train_s, **shape)
    (expected,) = expect([before], synchronous=synchronous)
    assert expected.as_it_was_s == pytest.approx(before.end_s)
    assert expected.measured_s == pytest.approx(before.end_s)
    faster = made(places, train_s, ranks=2, **shape)
    assert expected.more_training_s == pytest.approx(faster.end_s)
    wider = made(2 * places, train_s, **shape)
    assert expected.more_inference_s == pytest.approx(wider.end_s)
    more = made(places, train_s, endpoints=2, **shape)
    assert expected.more_endpoints_s == pytest.approx(more.end_s)
    assert expected.gains[MORE_TRAINING] == pytest.approx(1 - faster.end_s / before.end_s)
    assert expected.gains[MORE_INFERENCE] == pytest.approx(1 - wider.end_s / before.end_s)
    assert expected.gains[MORE_ENDPOINTS] == pytest.approx(1 - more.end_s / before.end_s)


def test_a_score_is_waited_for_and_takes_no_place() -> None:
    before = made(24, 0.1, score_s=0.5)
    (expected,) = expect([before], synchronous=False)
    assert expected.as_it_was_s == pytest.approx(before.end_s)


def test_places_that_cannot_be_told_from_tokens_are_taken_as_free() -> None:
    """With as many requests at a time for the whole batch, nothing says what one of them costs."""
    before = made(8, 0.01, slower_s=0.001)
    (expected,) = expect([before], synchronous=False)
    assert expected.as_it_was_s == pytest.approx(before.end_s)
    assert expected.more_inference_s == pytest.approx(2 * 2.8 + 0.08 + 1.0, rel=0.02)


def test_advice_names_what_the_batch_is_bound_by() -> None:
    slow_trainer = advice([made(24, 2.0)], synchronous=False, devices_per_rank=1)
    # 2 s, 24 of training by two, 1 behind it: 27 s in place of 51
    assert slow_trainer == (
        "training-bound: one more training device would save 47% of a batch's time, twice the "
        "inference endpoints 0%, twice the places at those there are 0% (the simulation is 0% off)"
    )
    slow_inference = advice([made(2, 0.1)], synchronous=False, devices_per_rank=1)
    # 12 waves of 2 s, 2 trained behind the last, 1: 25.2 s; 6 waves, 4 trained: 13.4
    assert slow_inference.startswith(
        "inference-bound: one more inference endpoint would save 47% of a batch's time, twice the "
        "training devices 0%, twice the places at those there are 47%"
    )
    neither = advice([made(24, 0.001, num_groups=20, token_s=0.1)], synchronous=False)
    assert neither.startswith("neither side holds the other up (")
    assert "twice the training ranks would save 0% of a batch's time" in neither


def of_four_ranks() -> list[BatchSpans]:
    """48 groups of 1 s, all there at 2 s: 12 each."""
    whole = made(48, 1.0, num_groups=48, ranks=4)
    return [
        BatchSpans(
            *(0, rank, 0.0, whole.end_s),
            [s for s in whole.spans if s.lane == f"rank {rank}" or not (rank or "rank" in s.lane)],
        )
        for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("of_each", "named"),
    [(1, "three more training devices"), (2, "six more training devices"),
     (8, "24 more training devices"), (None, "three more training ranks")],
)  # fmt: skip
def test_the_least_number_that_saves_most_is_named(of_each, named) -> None:
    """15 s: twice the ranks save 6; two more 4, three more 5, which is over 80 % of it."""
    told = advice(of_four_ranks(), synchronous=False, devices_per_rank=of_each)
    assert told.startswith(f"training-bound: {named} would save 33% of a batch's time, twice the")


def test_a_simulation_that_is_off_advises_nothing() -> None:
    """Training that waits for something which no rate has."""

    def late(wait_s: float) -> BatchSpans:
        before = made(24, 1.0)
        spans = [
            msgspec.structs.replace(span, start_s=span.start_s + wait_s, end_s=span.end_s + wait_s)
            if span.lane == "rank 0"
            else span
            for span in before.spans
        ]
        return batch(spans, before.end_s + wait_s)

    told = advice([late(5.0)], synchronous=False)  # 27 s, and took 32
    assert told == "the simulation of these batches is 16% off what they took: no advice is given"
    told = advice([late(1.0)], synchronous=False)
    assert told.startswith("training-bound") and told.endswith("(the simulation is 4% off)")


def test_of_episodes_nothing_is_advised() -> None:
    spans = [*made(24, 2.0).spans, Span("environment tools", "episode", 0.0, 1.0)]
    episodes = [batch(spans, 51.0)]
    assert advice(episodes, synchronous=False).startswith("samples are episodes, which are not")
    assert expect(episodes, synchronous=False) == []


def test_prompts_that_are_not_shared_are_trained_as_often_as_they_were() -> None:
    """8 responses of 10 tokens to a prompt of 100: 880 tokens a group, not 180."""
    args = {"response_tokens": 10, "prompt_tokens": 100}
    spans = [Span("endpoint http://a:1", "request", 0.0, 1.0, args) for _ in range(32)]
    for index in range(4):
        spans.append(Span("producer 0", "group", 0.0, 1.0, {"index": index}))
        own = {"num_tokens": 880}
        spans.append(Span("rank 0", "train", 1.0 + 2 * index, 3.0 + 2 * index, own))
    spans += phases(("step", 1.0), start_s=9.0)
    (expected,) = expect([batch(spans, 10.0)], synchronous=False)
    assert expected.as_it_was_s == pytest.approx(10.0)
    assert expected.more_training_s == pytest.approx(6.0)


def test_several_ranks_take_groups_of_one_batch() -> None:
    """Not each its own batch: of 24 groups of 1 s, two ranks have 12 each."""
    one = made(24, 1.0)
    half = [s for s in one.spans if s.lane == "rank 0" and s.name == "train"]
    others = [s for s in one.spans if s not in half]
    ranks = []
    for rank in (0, 1):
        own = phases(*[("train", 1.0)] * 12, ("step", 1.0), start_s=2.0, lane=f"rank {rank}")
        args = {"num_tokens": TOKENS + 10}
        own = [Span(s.lane, s.name, s.start_s, s.end_s, args) for s in own if s.name == "train"]
        spans = [*own, *(s for s in others if rank == 0 and not s.lane.startswith("rank"))]
        ranks.append(BatchSpans(0, rank, 0.0, 15.0, spans))
    (expected,) = expect(ranks, synchronous=False)
    assert expected.as_it_was_s == pytest.approx(15.0)
    assert expected.more_training_s == pytest.approx(9.0)


def test_without_trained_groups_or_requests_there_is_nothing_to_advise() -> None:
    assert expect([batch(phases(("begin", 1.0)), 1.0)], synchronous=False) == []
    assert "nothing to advise" in advice([batch([], 1.0)], synchronous=False)
    few = made(4, 0.1, num_groups=19)
    assert "no trained batch of 20 requests" in advice([few], synchronous=False)
