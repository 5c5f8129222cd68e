"""What was kept is told from what is another run, on a machine that computes otherwise."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden import golden_run, whole_run
from tests.golden.comparison import assert_as_kept, signs, sketch

RUNS = {
    golden_run.GOLDEN: golden_run.WEIGHTS_TOLERANCE,
    whole_run.KEPT: whole_run.WEIGHTS_TOLERANCE,
}


class Kept:
    """What was kept of a run, and what is let through."""

    def __init__(self, file: Path) -> None:
        self.run: dict[str, Any] = json.loads(file.read_text())
        self.tolerance = RUNS[file]

    def compare(self, now: dict[str, Any]) -> None:
        assert_as_kept(now, self.run, weights_tolerance=self.tolerance)

    def on_another_processor(self) -> dict[str, Any]:
        other = {"arithmetic": "another processor", "weights": "0" * 64}
        return copy.deepcopy(self.run) | other


@pytest.fixture(params=RUNS, ids=lambda file: file.stem)
def kept(request: pytest.FixtureRequest) -> Kept:
    return Kept(request.param)


def test_rounding_is_let_through_on_another_processor_only(kept: Kept) -> None:
    now = kept.on_another_processor()
    now["steps"][1]["loss"] += 3e-7
    for figures in now["sketch"].values():
        figures[1] += 0.5 * kept.tolerance * figures[0]
    kept.compare(now)
    with pytest.raises(AssertionError):
        kept.compare(now | {"arithmetic": kept.run["arithmetic"]})


def test_on_the_same_processor_the_digest_counts(kept: Kept) -> None:
    kept.compare(copy.deepcopy(kept.run))
    with pytest.raises(AssertionError):
        kept.compare(kept.run | {"weights": "0" * 64})


@pytest.mark.parametrize("figure", ["loss", "grad_norm"])
def test_a_thousandth_of_a_figure_is_seen(kept: Kept, figure: str) -> None:
    now = kept.on_another_processor()
    now["steps"][-1][figure] *= 1.001
    with pytest.raises(AssertionError, match=figure):
        kept.compare(now)


def test_weights_that_are_elsewhere_are_seen(kept: Kept) -> None:
    name = sorted(kept.run["sketch"])[0]
    norm = kept.run["sketch"][name][0]
    for place, value in enumerate(kept.run["sketch"][name]):
        for wrong in (value + 2 * kept.tolerance * norm, float("nan")):
            now = kept.on_another_processor()
            now["sketch"][name][place] = wrong
            with pytest.raises(AssertionError, match="differ by more than"):
                kept.compare(now)


def test_a_missing_step_or_tensor_is_seen(kept: Kept) -> None:
    for part in ("steps", "sketch"):
        now = kept.on_another_processor()
        now[part].pop(-1 if part == "steps" else sorted(now[part])[0])
        with pytest.raises(AssertionError):
            kept.compare(now)


def test_a_projection_sees_what_keeps_the_norm() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((30, 40)))
    swapped = values.flip(0)
    (before,), (after,) = (list(sketch([("w", v)]).values()) for v in (values, swapped))
    assert before[0] == pytest.approx(after[0])
    assert all(abs(a - b) > 1e-2 for a, b in zip(before[1:], after[1:], strict=True))
    assert before[1] == pytest.approx(float(signs(0, values.numel()) @ values.numpy().ravel()))


def test_signs_are_balanced_and_differ_between_seeds() -> None:
    assert set(signs(0, 1000)) == {1.0, -1.0} and signs(0, 70).shape == (70,)
    assert abs(signs(0, 10_000).mean()) < 0.05
    assert abs((signs(0, 10_000) * signs(1, 10_000)).mean()) < 0.05
