"""Cosines and norms of ``easyrl lab`` against numpy's, and what they are of nothing."""

import math

import numpy as np
import pytest
import torch

from easyrl.lab.variants import Measured, compare, cosine


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in
            (("a", (3, 4)), ("b", (5,)))}  # fmt: skip


def flat(values: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([values[name].double().numpy().ravel() for name in ("a", "b")])


def test_all_tensors_are_one_vector() -> None:
    one, other = tensors(0), tensors(1)
    a, b = flat(one), flat(other)
    expected = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
    assert cosine(one, other) == pytest.approx(expected, rel=1e-12)
    assert cosine(one, {name: -2 * value for name, value in one.items()}) == pytest.approx(-1)


def test_of_no_direction_there_is_no_cosine() -> None:
    one = tensors(0)
    assert math.isnan(cosine(one, {name: 0 * value for name, value in one.items()}))


def test_a_weight_that_only_one_trains_counts_as_zero() -> None:
    one = tensors(0)
    part = {"a": one["a"]}
    expected = one["a"].double().norm() / np.linalg.norm(flat(one))
    assert cosine(one, part) == pytest.approx(float(expected), rel=1e-12)


def test_an_update_has_its_norm_and_what_is_not_shown_is_left_out() -> None:
    own = Measured((), {"loss": 1.0, "time/step_s": 2.0}, [tensors(0)], tensors(2))
    other = Measured(("a=1",), {"loss": 3.0}, [tensors(1)], tensors(3))
    row = compare(own, other)
    assert row.update_norm == pytest.approx(float(np.linalg.norm(flat(tensors(3)))), rel=1e-12)
    assert row.metrics == {"loss": 3.0} and compare(own, own).metrics == {"loss": 1.0}
    assert row.update_cosine == cosine(own.update, other.update)


def test_further_updates_have_cosines_of_their_own_as_many_as_both_have() -> None:
    own = Measured((), {}, [tensors(0), tensors(1), tensors(2)], tensors(3))
    other = Measured(("a=1",), {}, [tensors(0), tensors(2)], tensors(3))
    row = compare(own, other)
    assert row.gradient_cosine == pytest.approx(1)  # as of a clip, which acts behind the first
    assert row.later_cosines == [cosine(tensors(1), tensors(2))]
    assert compare(own, own).later_cosines == pytest.approx([1, 1])
