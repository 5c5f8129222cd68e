"""Requests in flight: the expected time of a batch, the fitted speed, and what is chosen of them.

All against a simulation that decodes token by token.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.inference_client.pool.adaptive_limit import AdaptiveLimit, Choice
from easyrl.inference_client.pool.decode_speed import (
    DecodeSpeed,
    TimedResponse,
    decode_terms,
    fit_decode_speed,
)
from easyrl.inference_client.pool.step_time import arrivals_s, batch_s, fastest
from tests.inference_client.batch_simulation import SimulatedBatch, simulate

LIMITS = (16, 32, 64, 128, 256)


def step_of(speed: DecodeSpeed):
    return lambda num: speed.step_s + num * speed.sequence_s


GROUPS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(
    GROUPS,
    st.integers(1, 30),
    st.floats(1e-3, 1.0),
    st.floats(0.0, 0.5),
    st.floats(0.0, 20.0),
)
def test_the_model_is_the_simulation(groups, max_inflight, step_s, sequence_s, train_s):
    speed = DecodeSpeed(step_s, sequence_s)
    seen = simulate(step_of(speed), groups, max_inflight, train_s)
    arrived = arrivals_s(speed.tokens_per_s, groups, max_inflight)
    assert arrived == pytest.approx(seen.arrivals_s, rel=1e-9)
    expected_s = batch_s(speed.tokens_per_s, groups, max_inflight, train_s)
    assert expected_s == pytest.approx(seen.trained_s, rel=1e-9)


def test_any_curve_of_throughput_is_taken():
    """One that falls beyond 3 sequences: preempted ones are computed again."""
    tokens_per_s = {1: 10.0, 2: 18.0, 3: 20.0, 4: 12.0, 5: 6.0}
    groups = [[4, 4, 4]] * 5
    seen_s, expected_s = (
        {n: trained_s(n) for n in tokens_per_s}
        for trained_s in (
            lambda n: simulate(lambda m: m / tokens_per_s[m], groups, n, 0.1).trained_s,
            lambda n: batch_s(tokens_per_s.__getitem__, groups, n, 0.1),
        )
    )
    assert expected_s == pytest.approx(seen_s)
    assert fastest(expected_s, 5, 0.03) == min(seen_s, key=seen_s.__getitem__) == 3


def test_a_limit_is_kept_unless_another_gains_enough():
    expected_s = {16: 0.98, 64: 1.0, 256: 1.2}
    assert fastest(expected_s, current=64, min_gain=0.03) == 64
    assert fastest(expected_s, current=64, min_gain=0.01) == 16
    assert fastest(expected_s, current=256, min_gain=0.03) == 16
    assert fastest(expected_s, current=100, min_gain=0.03) == 16  # no longer one of them


def log_normal(num_groups: int, size: int, seed: int, mean: float = 4.8) -> list[list[int]]:
    rng = random.Random(seed)
    draw = lambda: min(512, max(32, int(rng.lognormvariate(mean, 0.7))))  # noqa: E731
    return [[draw() for _ in range(size)] for _ in range(num_groups)]


def even(num_groups: int, size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(15, 24) for _ in range(size)] for _ in range(num_groups)]


def terms(batch: SimulatedBatch) -> np.ndarray:
    return decode_terms([response for group in batch.responses for response in group])


@pytest.mark.parametrize("speed", [DecodeSpeed(3e-3, 3e-5), DecodeSpeed(0.02, 1e-6)])
def test_lengths_that_differ_show_the_speed_in_one_batch(speed):
    batch = simulate(step_of(speed), log_normal(8, 8, 0), 64, 0.0)
    found = fit_decode_speed([terms(batch)])
    for num in LIMITS:  # 10 %: each response is taken to grow evenly, and 256 were never there
        assert found.tokens_per_s(num) == pytest.approx(speed.tokens_per_s(num), rel=0.1)


def test_equal_lengths_show_it_in_two():
    speed = DecodeSpeed(3e-3, 3e-5)
    batches = [simulate(step_of(speed), [[20] * 8] * 32, n, 0.0) for n in (256, 64)]
    found = fit_decode_speed([terms(batch) for batch in batches])
    assert found == pytest.approx(speed, rel=1e-6)


def test_what_cannot_be_is_no_part_of_a_speed():
    # twice as many in flight and half as long: no negative share of each sequence
    many = [TimedResponse(0.0, 1.0, 10)] * 8
    few = [TimedResponse(0.0, 2.0, 10)] * 4
    found = fit_decode_speed([decode_terms(many), decode_terms(few)])
    assert found.sequence_s == 0.0 and found.step_s > 0.0
    # nothing but the tokens counts: a server that decodes one sequence at a time
    queued = [TimedResponse(0.0, 0.1 * (n + 1), 10) for n in range(8)]
    found = fit_decode_speed([decode_terms(queued)])
    assert found.step_s >= 0.0 and found.sequence_s > 0.0


WORKLOADS = {
    # name: (groups of a batch, step of the server, seconds of training for a group)
    "short": (lambda seed: even(32, 8, seed), step_of(DecodeSpeed(2.7e-3, 3.5e-5)), 0.016),
    "training is long": (lambda seed: even(32, 8, seed), step_of(DecodeSpeed(1e-3, 3e-5)), 0.1),
    "training is nothing": (lambda seed: even(32, 8, seed), step_of(DecodeSpeed(3e-3, 3e-5)), 1e-3),
    "long tail": (lambda seed: log_normal(8, 8, seed), step_of(DecodeSpeed(3e-3, 6e-5)), 0.15),
    "large": (lambda seed: log_normal(128, 8, seed), step_of(DecodeSpeed(0.02, 4e-5)), 0.15),
    # a device whose step takes the same up to 64 sequences
    "memory-bound": (lambda seed: log_normal(64, 8, seed), lambda n: 0.02 * max(1.0, n / 64), 0.2),
}


def train_on(
    limit: AdaptiveLimit, work: str, batches: range, tells: bool = True, slowdown: float = 1.0
) -> list[Choice | None]:
    """Runs ``batches``; what was chosen behind each."""
    groups_of, calm_step_s, calm_train_s = WORKLOADS[work]
    train_s = slowdown * calm_train_s
    choices = []
    for number in batches:
        batch = simulate(
            lambda num: slowdown * calm_step_s(num),
            groups_of(number),
            limit.max_inflight,
            train_s,
        )
        for key, group in enumerate(batch.responses):
            for response in group:
                limit.saw(key, response)
        choices.append(limit.end_batch(train_s if tells else 0.0, batch.trained_s))
    return choices


@pytest.mark.parametrize("work", WORKLOADS)
def test_after_five_batches_it_is_within_5_percent_of_the_best_fixed_limit(work):
    limit = AdaptiveLimit(256)
    choices = [choice for choice in train_on(limit, work, range(5)) if choice is not None]
    assert len(choices) == 1, "said what it chose"
    groups_of, step_s, train_s = WORKLOADS[work]
    took_s = {  # of three other batches
        n: sum(simulate(step_s, groups_of(k), n, train_s).trained_s for k in (90, 91, 92))
        for n in {*LIMITS, limit.max_inflight}
    }
    assert took_s[limit.max_inflight] <= 1.05 * min(took_s.values()), took_s


def used(limit: AdaptiveLimit, work: str, num_batches: int) -> list[int]:
    """The limit of each batch."""
    limits = []
    for number in range(num_batches):
        limits.append(limit.max_inflight)
        train_on(limit, work, range(number, number + 1))
    return limits


def test_fewer_are_tried_only_where_that_could_gain():
    assert used(AdaptiveLimit(256), "long tail", 8) == [256] * 8, "the first two show it"
    # equal lengths do not show what few would lose: only that nothing could be gained
    assert used(AdaptiveLimit(256), "training is long", 8) == [256] * 8
    assert used(AdaptiveLimit(256), "short", 6) == [256, 256, 64, 128, 32, 64]


def test_no_one_limit_is_the_best_of_all():
    """Else the test above would show nothing."""
    chosen = set()
    for work in ("short", "training is nothing", "large"):
        limit = AdaptiveLimit(256)
        train_on(limit, work, range(5))
        chosen.add(limit.max_inflight)
    assert len(chosen) > 1


def test_where_training_waits_for_the_last_group_it_takes_all():
    limit = AdaptiveLimit(256)
    train_on(limit, "training is long", range(5), tells=False)
    assert limit.max_inflight == 256


def test_it_follows_the_speed_of_training_and_does_not_flap():
    limit = AdaptiveLimit(256)
    train_on(limit, "training is nothing", range(5))
    assert limit.max_inflight == 256
    choices = train_on(limit, "short", range(5, 12))
    assert limit.max_inflight < 256
    # two batches that are other ones, the second of which is the first of five
    assert [number for number, choice in enumerate(choices, 5) if choice is not None] == [10]
    before = limit.max_inflight
    assert train_on(limit, "short", range(12, 30)) == [None] * 18
    assert limit.max_inflight == before


def test_one_batch_that_is_other_changes_nothing():
    limit = AdaptiveLimit(256)
    train_on(limit, "short", range(5))
    before = limit.max_inflight
    for number in range(5, 15):
        train_on(limit, "training is long" if number % 2 else "short", range(number, number + 1))
        assert limit.max_inflight == before


@pytest.mark.parametrize("work", ["short", "long tail", "training is nothing"])
@pytest.mark.parametrize("slow", range(5))
def test_a_batch_in_which_the_machine_is_busy_is_not_believed(work, slow):
    """One of the tried ones takes three times as long; another with the same limit does not."""
    calm, disturbed = AdaptiveLimit(256), AdaptiveLimit(256)
    train_on(calm, work, range(5))
    for number in range(5):
        train_on(disturbed, work, range(number, number + 1), slowdown=3.0 if number == slow else 1)
    groups_of, step_s, train_s = WORKLOADS[work]
    took_s = [
        sum(simulate(step_s, groups_of(k), n, train_s).trained_s for k in (90, 91, 92))
        for n in (calm.max_inflight, disturbed.max_inflight)
    ]
    assert took_s[1] <= 1.05 * took_s[0]


def test_it_stays_within_what_the_endpoint_takes():
    limit = AdaptiveLimit(24)
    assert set(used(limit, "long tail", 8)) == {16, 24}


def test_a_batch_of_few_responses_leaves_nothing_to_choose():
    limit = AdaptiveLimit(256)
    for _ in range(5):
        for _ in range(16):
            limit.saw(0, TimedResponse(0.0, 1.0, 10))
        assert limit.end_batch(0.1, 2.0) is None
    assert limit.end_batch(0.1, 2.0) is None, "an empty one"
    assert limit.max_inflight == 256


TURNS = 4


def train_on_sessions(limit: AdaptiveLimit, work: str, batches: range) -> list[Choice | None]:
    """As ``train_on``, of samples that are a few turns each, answered one after the other."""
    groups_of, step_s, train_s = WORKLOADS[work]
    choices = []
    for number in batches:
        batch = simulate(step_s, groups_of(number), limit.max_inflight, train_s)
        for key, group in enumerate(batch.responses):
            for sample, (began_s, ended_s, num_tokens) in enumerate(group):
                turn_s = (ended_s - began_s) / TURNS
                for turn in range(TURNS):
                    first, last = (num_tokens * n // TURNS for n in (turn, turn + 1))
                    times = began_s + turn * turn_s, began_s + (turn + 1) * turn_s
                    limit.saw(key, TimedResponse(*times, last - first), session=(key, sample))
        choices.append(limit.end_batch(train_s, batch.trained_s))
    return choices


@pytest.mark.parametrize("work", ["short", "training is nothing", "large"])
def test_turns_of_a_session_are_one_sample(work):
    """The same tokens at the same times: what is chosen does not depend on who asked for them."""
    whole, turns = AdaptiveLimit(256), AdaptiveLimit(256)
    (expected,) = filter(None, train_on(whole, work, range(5)))
    (found,) = filter(None, train_on_sessions(turns, work, range(5)))
    assert found.lengths == expected.lengths
    assert found.max_inflight == expected.max_inflight
    assert found.expected_s == pytest.approx(expected.expected_s, rel=0.02)


def test_few_sessions_of_many_turns_leave_nothing_to_choose():
    limit = AdaptiveLimit(256)
    for turn in range(10):
        for sample in range(16):
            limit.saw(0, TimedResponse(turn, turn + 1.0, 10), session=sample)
    assert limit.num_responses == 160
    assert limit.end_batch(0.1, 2.0) is None
    for _ in range(5):
        assert limit.end_batch(0.1, 2.0) is None
    assert limit.max_inflight == 256


@pytest.mark.parametrize("beside", [1.0, 1.3])
def test_fewer_that_have_taken_longer_are_not_chosen(beside):
    """Decoding beside training takes longer than the model knows, by ``beside``."""
    limit = AdaptiveLimit(256)
    groups_of, step_s, train_s = WORKLOADS["short"]
    for number in range(5):
        batch = simulate(step_s, groups_of(number), limit.max_inflight, train_s)
        for key, group in enumerate(batch.responses):
            for response in group:
                limit.saw(key, response)
        took_s = batch.trained_s * (1.0 if limit.max_inflight == 256 else beside)
        choice = limit.end_batch(train_s, took_s)
    few = min(choice.took_s)
    assert min(choice.expected_s, key=choice.expected_s.__getitem__) < 256, "the model says so"
    if beside == 1.0:
        assert choice.took_s[few] < choice.took_s[256]
        assert choice.max_inflight == limit.max_inflight < 256
    else:
        assert choice.took_s[few] > choice.took_s[256]
        assert choice.max_inflight == limit.max_inflight == 256


def test_of_fewer_the_one_that_took_least_is_chosen_not_the_one_the_model_likes_best():
    """Equal lengths and long training; the fewer decode at a time, the more they are in each
    other's way."""
    step_s, train_s = step_of(DecodeSpeed(5e-3, 4.5e-4)), 0.35

    def trained_s(num: int) -> float:
        return simulate(step_s, [[64] * 8] * 16, num, train_s).trained_s * (1 + 20 / num)

    limit, tried = AdaptiveLimit(256), []
    for _ in range(5):
        tried.append(limit.max_inflight)
        batch = simulate(step_s, [[64] * 8] * 16, limit.max_inflight, train_s)
        for key, group in enumerate(batch.responses):
            for response in group:
                limit.saw(key, response)
        choice = limit.end_batch(train_s, trained_s(limit.max_inflight))
    took_s = {num: trained_s(num) for num in LIMITS}
    assert min(choice.expected_s, key=choice.expected_s.__getitem__) == 32
    assert took_s[limit.max_inflight] == min(took_s.values()) < 0.95 * took_s[32]
    assert tried == [256, 256, 32, 64, 256]


def test_what_was_tried_may_be_more_than_the_last_batch_has_samples():
    limit, step_s = AdaptiveLimit(256), step_of(DecodeSpeed(2.7e-3, 3.5e-5))
    for number in range(5):
        groups = even(32 if number < 4 else 5, 8, number)
        train_s = 0.05 if limit.max_inflight > 100 else 0.016
        batch = simulate(step_s, groups, limit.max_inflight, train_s)
        for key, group in enumerate(batch.responses):
            for response in group:
                limit.saw(key, response)
        choice = limit.end_batch(train_s, batch.trained_s)
    assert choice.max_inflight == limit.max_inflight == 64


def test_all_need_not_have_been_tried():
    """A benchmark gives the limit itself."""
    limit, choices = AdaptiveLimit(256), []
    for number in range(5):
        limit.max_inflight = 64
        choices += train_on(limit, "training is nothing", range(number, number + 1))
    (choice,) = filter(None, choices)
    assert choice.max_inflight in (64, 256) and set(choice.took_s) == {64}


def test_a_choice_says_why():
    limit = AdaptiveLimit(256)
    said = str(next(filter(None, train_on(limit, "short", range(5)))))
    assert f"{limit.max_inflight} requests in flight: 256 samples of 19" in said or "of 20" in said
    assert "s with 256" in said and "16 ms a group); tried, " in said
