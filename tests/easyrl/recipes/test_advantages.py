"""Group-relative advantages against TRL's published formula, and the cases that must be exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from easyrl.recipes.estimators import group_advantages

REWARDS = np.array([1.0, 0.0, 0.25, 0.0, 1.0, -2.0])


@pytest.mark.parametrize("scale", [True, False])
def test_equals_trl(scale: bool) -> None:
    """TRL: ``r - mean``, divided by ``torch.std`` (which is unbiased) plus 1e-4 if scaled."""
    rewards = torch.from_numpy(REWARDS)
    expected = rewards - rewards.mean()
    if scale:
        expected = expected / (rewards.std() + 1e-4)
    got = group_advantages(REWARDS, "group_std" if scale else "group_mean")
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-14)


def test_division_by_the_deviation_is_seen() -> None:
    centred = group_advantages(REWARDS, "group_mean")
    assert not np.allclose(centred, group_advantages(REWARDS, "group_std"), rtol=0.05)
    population = centred / (REWARDS.std() + 1e-4)  # ddof=0, the usual mistake
    assert not np.allclose(population, group_advantages(REWARDS, "group_std"), rtol=0.05)


@pytest.mark.parametrize("mode", ["group_std", "group_mean"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exact_zeros(mode: str, value: float) -> None:
    """Also where the mean of G equal floats is not that float: 1e-9 / eps would be 1e-5."""
    rewards = np.full(7, value, dtype=np.float32)
    assert not group_advantages(rewards, mode).any()


def test_keeps_the_dtype_and_leaves_the_rewards_alone() -> None:
    rewards = REWARDS.astype(np.float32)
    assert group_advantages(rewards, "group_std").dtype == np.float32
    np.testing.assert_array_equal(rewards, REWARDS.astype(np.float32))


@pytest.mark.parametrize("rewards", [np.array([1.0]), np.array([]), np.ones((2, 2))])
def test_refuses_groups_without_a_baseline(rewards: np.ndarray) -> None:
    with pytest.raises(ValueError, match="at least 2 rewards.*num_generations"):
        group_advantages(rewards, "group_std")


def test_refuses_rewards_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(np.array([0.0, np.nan]), "group_std")
