"""The simulation against closed forms, and against the dispatcher's own queueing model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.inference_client.pool.step_time import arrivals_s, batch_s
from easyrl.simulation.pipeline import simulate, simulate_batch
from easyrl.simulation.setting import Lengths, Rates, Setting

RATES = Rates(
    decode_step_s=0.01,
    decode_each_s=0.0,
    prefill_s=0.0,
    request_s=0.0,
    train_token_s=0.001,
    train_group_s=0.0,
    trained_share=1.0,
    update_s=0.0,
    border_s=0.5,
)
SETTING = Setting(
    RATES,
    Lengths(mean=100),
    endpoints=1,
    places=8,
    ranks=1,
    batch_size=4,
    group_size=2,
    prompt_tokens=50,
)


def test_one_group_takes_its_longest_response_then_its_training() -> None:
    outcome = simulate_batch(replace(SETTING, batch_size=1), np.array([[100, 40]]))
    assert outcome.first_group_s == pytest.approx(1.0)
    assert outcome.step_s == pytest.approx(1.0 + (50 + 140) * 0.001 + 0.5)
    assert outcome.tokens == 140 + 2 * 50  # the prompt with each response
    assert outcome.tpspd(SETTING) == pytest.approx(240 / outcome.step_s / 2)
    assert outcome.training_idle == pytest.approx(1 - 0.19 / outcome.step_s)
    assert outcome.inference_idle == pytest.approx(1 - 1.4 / (8 * outcome.step_s))


def test_a_queue_of_equal_groups_async_and_sync() -> None:
    lengths = np.full((4, 2), 100)
    two_at_a_time = replace(SETTING, places=4)
    # groups arrive at 1, 1, 2, 2 s; each is trained for 0.25 s
    outcome = simulate_batch(two_at_a_time, lengths)
    assert (outcome.first_group_s, outcome.last_group_s) == pytest.approx((1.0, 2.0))
    assert outcome.step_s == pytest.approx(2.0 + 2 * 0.25 + 0.5)
    outcome = simulate_batch(replace(two_at_a_time, mode="sync"), lengths)
    assert outcome.step_s == pytest.approx(2.0 + 4 * 0.25 + 0.5)
    outcome = simulate_batch(replace(two_at_a_time, mode="sync", ranks=2), lengths)
    assert outcome.step_s == pytest.approx(2.0 + 2 * 0.25 + 0.5)


def test_prompts_requests_and_groups_cost_what_they_cost() -> None:
    rates = replace(RATES, prefill_s=0.002, request_s=0.1, train_group_s=0.3, trained_share=0.5)
    outcome = simulate_batch(replace(SETTING, rates=rates, batch_size=1), np.array([[100, 40]]))
    assert outcome.first_group_s == pytest.approx(1.0 + 0.1 + 0.1)
    assert outcome.step_s == pytest.approx(1.2 + 190 * 0.5 * 0.001 + 0.3 + 0.5)


def test_prompts_that_are_not_shared_are_trained_with_each_response() -> None:
    alone = replace(SETTING, batch_size=1, shares_prompts=False)
    outcome = simulate_batch(alone, [[100, 40]])
    assert outcome.step_s == pytest.approx(1.0 + (2 * 50 + 140) * 0.001 + 0.5)


def test_updates_have_slices_of_the_prompts_one_behind_the_other() -> None:
    rates = replace(RATES, update_s=0.2)
    setting = replace(SETTING, rates=rates, updates=2)  # all are sent at once
    outcome = simulate_batch(setting, [[100, 100], [200, 200], [100, 100], [100, 100]])
    # the first update's groups are there at 1 and 2 s, trained at 2.45; then its step, then others
    assert outcome.step_s == pytest.approx(2.0 + 0.45 + 0.2 + 0.25 + 0.25 + 0.5)
    synchronous = simulate_batch(
        replace(setting, mode="sync"), [[100, 100], [200, 200], [100, 100], [100, 100]]
    )
    all_there_s = synchronous.last_group_s
    assert synchronous.step_s == pytest.approx(all_there_s + 3 * 0.25 + 0.45 + 0.2 + 0.5)


def groups_strategy():
    sizes = st.tuples(st.integers(1, 12), st.integers(1, 4))
    return sizes.flatmap(
        lambda size: st.lists(
            st.lists(st.integers(1, 300), min_size=size[1], max_size=size[1]),
            min_size=size[0],
            max_size=size[0],
        )
    )


@settings(deadline=None, max_examples=60)
@given(groups_strategy(), st.integers(1, 10), st.floats(0, 0.01))
def test_one_endpoint_is_as_the_dispatchers_model_has_it(groups, places, each_s) -> None:
    """Where a group has all its samples admitted in order, as there."""
    rates = replace(RATES, decode_each_s=each_s, train_token_s=0.0, train_group_s=0.2)
    lengths = np.array(groups)
    setting = replace(
        SETTING, rates=rates, places=places, batch_size=len(groups), group_size=lengths.shape[1]
    )

    def throughput(m: int) -> float:
        return m / (rates.decode_step_s + m * each_s)

    expected = arrivals_s(throughput, groups, places)
    outcome = simulate_batch(setting, lengths)
    assert outcome.first_group_s == pytest.approx(expected[0])
    assert outcome.last_group_s == pytest.approx(expected[-1])
    whole = batch_s(throughput, groups, places, 0.2)
    assert outcome.step_s == pytest.approx(whole + rates.border_s)


@settings(deadline=None, max_examples=40)
@given(groups_strategy(), st.integers(1, 3), st.integers(1, 8), st.integers(1, 3))
def test_more_of_anything_is_never_slower_by_more_than_a_group(
    groups, endpoints, places, ranks
) -> None:
    lengths = np.array(groups)
    size = {"batch_size": len(groups), "group_size": lengths.shape[1]}
    setting = replace(SETTING, endpoints=endpoints, places=places, ranks=ranks, **size)
    before = simulate_batch(setting, lengths)
    one_group_s = lengths.max() * 0.01 + (50 + lengths.sum(1).max()) * 0.001
    for more in ({"endpoints": endpoints + 1}, {"places": places + 1}, {"ranks": ranks + 1}):
        after = simulate_batch(replace(setting, **more), lengths)
        assert after.step_s <= before.step_s + one_group_s  # list scheduling has anomalies
        assert after.tokens == before.tokens
    synchronous = simulate_batch(replace(setting, mode="sync"), lengths)
    assert synchronous.step_s >= before.step_s - 1e-9
    assert before.step_s >= before.last_group_s


def test_several_draws_are_averaged_and_a_seed_repeats_them() -> None:
    setting = replace(SETTING, lengths=Lengths(mean=100, sigma=0.5, longest=400))
    one, other = simulate(setting, seed=1), simulate(setting, seed=1)
    assert one == other and one != simulate(setting, seed=2)


@pytest.mark.parametrize("name", ["endpoints", "places", "ranks", "batch_size", "group_size"])
def test_a_setting_without_anything_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: has to be positive"):
        replace(SETTING, **{name: 0})


def test_lengths_have_the_mean_and_the_limits_that_they_are_given() -> None:
    rng = np.random.default_rng(0)
    drawn = Lengths(mean=200, sigma=0.6, longest=100_000).draw(2000, 8, rng)
    assert drawn.mean() == pytest.approx(200, rel=0.03) and drawn.min() >= 1
    seen = Lengths((5, 10, 15), longest=12).draw(300, 4, rng)
    assert set(np.unique(seen)) == {5, 10, 12}
    alike = Lengths(mean=200, sigma=0.6, within_group=0.9).draw(500, 8, rng)
    assert alike.std(axis=1).mean() < 0.6 * alike.std()
    with pytest.raises(ValueError, match="--mean-tokens: has to be a number above 0, and is 0"):
        Lengths()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_lengths_that_are_no_numbers_are_refused_by_option(value: float) -> None:
    with pytest.raises(ValueError, match="--mean-tokens: has to be a number above 0"):
        Lengths(mean=value)
    with pytest.raises(ValueError, match="--sigma: has to be a number from 0 to 10"):
        Lengths(mean=100, sigma=value)
    with pytest.raises(ValueError, match="--sigma: has to be a number from 0 to 10"):
        Lengths((5, 10), sigma=value)
