"""The sides of ``benchmarks.logprob_memory`` compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.logprob_memory import METHODS, WHOLE, Inputs, Work, run


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_sides_agree(entropy_gradient: bool) -> None:
    work = Work(
        tokens=33,
        vocab=500,
        hidden=16,
        chunk=8,
        entropy_gradient=entropy_gradient,
        device="cpu",
        dtype=torch.float32,
        threads=1,
        triton=True,
    )
    inputs = Inputs.random(work)
    sides = {}
    for side in (WHOLE, *METHODS):
        values = run(side, inputs, work)
        assert inputs.hidden.grad is not None and inputs.weight.grad is not None
        sides[side] = (*values, inputs.hidden.grad, inputs.weight.grad)
    for method in METHODS:
        for got, expected in zip(sides[method], sides[WHOLE], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
