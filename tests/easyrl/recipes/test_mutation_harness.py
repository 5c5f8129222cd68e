"""What the mutation tests rest on: a change is found, a survivor and a lost anchor are failures."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from easyrl.recipes import estimators
from tests.easyrl.recipes.mutations import Mutation, assert_killed, copied_package

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
SIGN = Mutation("estimators.py", "exact - exact.mean()", "exact + exact.mean()")
EPS = Mutation("estimators.py", "eps: float = 1e-4", "eps: float = 2e-4")


def check(recipes: ModuleType) -> None:
    got = recipes.estimators.group_advantages(REWARDS, "group_std")
    np.testing.assert_allclose(got, (REWARDS - 0.6) / (REWARDS.std(ddof=1) + 1e-4), rtol=1e-2)


def test_a_copy_passes_and_a_change_does_not() -> None:
    with copied_package() as copy:
        check(copy)
    assert_killed(SIGN, check)


def test_a_survivor_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="survived: estimators.py: eps: float = 1e-4 ->"):
        assert_killed(EPS, check)  # below the tolerance of this check


def test_a_change_reaches_all_that_import_the_file_and_nothing_outside() -> None:
    with copied_package(SIGN) as copy, copied_package() as other:
        assert copy.group_advantages is copy.grpo.group_advantages
        assert copy.dapo.DAPO.__mro__[1] is copy.GRPO is not other.GRPO
        assert (copy.group_advantages(REWARDS, "group_mean") > 0).all()
        assert (other.group_advantages(REWARDS, "group_mean") < 0).any()
        assert copy.__name__ != other.__name__
        names = [name for name in sys.modules if name.startswith((copy.__name__, other.__name__))]
        assert len(names) > 10
    assert not set(names) & set(sys.modules)
    assert (estimators.group_advantages(REWARDS, "group_mean") < 0).any()


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (Mutation("estimators.py", "no such text", "x"), "found 0 times"),
        (Mutation("estimators.py", "return", "raise"), r"found \d+ times"),
        (Mutation("estimators.py", SIGN.before, SIGN.before), "changes nothing"),
        (Mutation("none.py", "a", "b"), "easyrl/recipes has no such file"),
    ],
)
def test_a_mutation_that_does_not_fit_is_an_error(mutation: Mutation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assert_killed(mutation, check)


def test_a_copy_that_cannot_be_imported_is_not_killed() -> None:
    with pytest.raises(SyntaxError):
        assert_killed(Mutation("estimators.py", "exact - exact.mean()", "exact -"), check)


def test_an_error_of_another_kind_is_not_a_kill() -> None:
    with pytest.raises(NameError):
        assert_killed(Mutation("estimators.py", "exact - exact.mean()", "exact - nowhere"), check)
