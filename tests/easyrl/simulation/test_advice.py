"""Advice against batches that are made with what was advised, by an arithmetic of their own."""

from __future__ import annotations

import pytest

from easyrl.simulation.advice import MORE_INFERENCE, MORE_TRAINING, advice, expect
from easyrl.timeline.spans import BatchSpans, Span
from tests.easyrl.timeline.made_spans import batch, phases

TOKENS, ENDPOINT = 100, "endpoint http://a:1"


def made(
    places: int,
    train_s: float,
    *,
    num_groups: int = 24,
    token_s: float = 0.02,
    slower_s: float = 0.0,
    synchronous: bool = False,
    score_s: float = 0.0,
) -> BatchSpans:
    """Groups of one response through ``places``, in waves; trained one by one; 1 s behind it.

    A token takes ``token_s`` and ``slower_s`` for each response of its wave. The last wave has what
    is left.
    """
    spans, arrivals, begin_s = [], [], 0.0
    for first in range(0, num_groups, places):
        wave = range(first, min(first + places, num_groups))
        end_s = begin_s + TOKENS * (token_s + slower_s * len(wave))
        args = {"response_tokens": TOKENS, "prompt_tokens": 10}
        for index in wave:
            spans.append(Span(ENDPOINT, "request", begin_s, end_s, args))
            spans.append(Span("producer 0", "group", begin_s, end_s + score_s, {"index": index}))
            if score_s:
                spans.append(Span("producer 0", "reward", end_s, end_s + score_s))
            arrivals.append(end_s + score_s)
        begin_s = end_s
    now_s = max(arrivals) if synchronous else 0.0
    for arrival_s in arrivals:
        now_s = max(now_s, arrival_s)
        spans.append(Span("rank 0", "train", now_s, now_s + train_s, {"num_tokens": TOKENS + 10}))
        now_s += train_s
    spans += phases(("step", 1.0), start_s=now_s)
    return batch(spans, now_s + 1.0)


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
    faster = made(places, train_s / 2, **shape)
    assert expected.more_training_s == pytest.approx(faster.end_s)
    wider = made(2 * places, train_s, **shape)
    assert expected.more_inference_s == pytest.approx(wider.end_s)
    assert expected.gains[MORE_TRAINING] == pytest.approx(1 - faster.end_s / before.end_s)
    assert expected.gains[MORE_INFERENCE] == pytest.approx(1 - wider.end_s / before.end_s)


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
    slow_trainer = advice([made(24, 2.0)], synchronous=False)
    # 2 s, 24 of training, 1 behind it: 51 s; with half the training 27
    assert slow_trainer.startswith("training-bound: twice the training devices would save 47%")
    slow_inference = advice([made(2, 0.1)], synchronous=False)
    # 12 waves of 2 s, 2 trained behind the last, 1: 25.2 s; 6 waves, 4 trained: 13.4
    assert slow_inference.startswith("inference-bound") and slow_inference.endswith("47%")


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
