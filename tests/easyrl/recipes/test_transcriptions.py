"""Every recipe's advantages, loss and gradient are its published equation's, on random batches."""

from __future__ import annotations

import pytest

import easyrl.recipes
from easyrl.recipes.loading import BUILT_IN
from tests.easyrl.recipes import ppo_formulas
from tests.easyrl.recipes.transcriptions import CASES, Batches, check_recipe, random_batches


@pytest.fixture(scope="module")
def batches() -> Batches:
    return random_batches(1000)


def test_the_batches_are_ragged_and_have_every_kind_of_response(batches: Batches) -> None:
    trained = batches.mask.sum(-1)
    assert set(batches.lengths.unique().tolist()) == {1, 2, 3, 4, 5, 6}
    assert (trained == 0).any() and (trained < batches.lengths).any()
    assert batches.truncated.any()
    equal = batches.rewards.max(-1).values == batches.rewards.min(-1).values
    assert 0 < equal.sum() < equal.numel()
    assert (batches.ratio > 5).any() and (batches.ratio < 0.2).any()


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_its_published_equation(batches: Batches, name: str) -> None:
    metrics = check_recipe(easyrl.recipes, CASES[name], batches)
    # the comparison is about every bound of the ratio too
    assert all(metrics[bound] > 0 for bound in CASES[name].bounds)
    assert all(bound in metrics for bound in CASES[name].bounds)


def test_every_recipe_on_rollouts_is_written_down_again() -> None:
    """Here or in ``ppo_formulas.py``; those on records are in ``test_record_recipes.py``."""
    cases = [*CASES.values(), *ppo_formulas.CASES.values()]
    assert {case.recipe for case in cases} == set(BUILT_IN) - {"sft", "dpo"}
