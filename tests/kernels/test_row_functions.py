"""A kernel along the rows of logits is used only where it agrees with torch; planted ones show it.

Planted on the CPU, which is taken for a device that has kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from easyrl.kernels.logprobs import row_functions, vocab_softmax
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.kernels.logprobs.vocab_softmax import RowSums

VOCAB = 9001


class Planted:
    """``vocab_softmax`` that counts its calls; the others below do one thing otherwise."""

    def __init__(self) -> None:
        self.calls = 0

    def row_sums(self, logits: Tensor, labels: Tensor, temperature: float) -> RowSums:
        self.calls += 1
        return vocab_softmax.row_sums(logits, labels, temperature)

    def softmax_gradient_(self, *arguments: Any) -> None:
        self.calls += 1
        vocab_softmax.softmax_gradient_(*arguments)


class Raises(Planted):
    def row_sums(self, logits: Tensor, labels: Tensor, temperature: float) -> RowSums:
        raise RuntimeError("no C compiler")


class LeavesOutTheLastBlock(Planted):
    def row_sums(self, logits: Tensor, labels: Tensor, temperature: float) -> RowSums:
        whole = super().row_sums(logits, labels, temperature)
        part = super().row_sums(logits[:, : VOCAB - 100], labels.clamp(max=7), temperature)
        return part._replace(label_logit=whole.label_logit)


class GivesNan(Planted):
    def row_sums(self, logits: Tensor, labels: Tensor, temperature: float) -> RowSums:
        sums = super().row_sums(logits, labels, temperature)
        return sums._replace(weighted_sum=sums.weighted_sum * torch.nan)


class ForgetsTheEntropy(Planted):
    def softmax_gradient_(self, *arguments: Any) -> None:
        super().softmax_gradient_(*arguments[:6], None, arguments[7])


class DoesNotWrite(Planted):
    def softmax_gradient_(self, *arguments: Any) -> None:
        super().softmax_gradient_(arguments[0].clone(), *arguments[1:])


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(row_functions, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(row_functions, "_triton_is_installed", lambda: True)
    row_functions.triton_or_torch.cache_clear()
    yield
    row_functions.triton_or_torch.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, functions: Planted) -> None:
    monkeypatch.setattr(row_functions, "_load_triton", lambda: functions)


def results(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Losses, values and gradients of both projections, in several chunks."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(dtype) for n in (20, VOCAB))
    labels = torch.randint(VOCAB, (20,), generator=generator)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    found = []
    for same_pass in (True, False):
        if same_pass:
            loss, *values = linear_logprobs(*leaves, labels, add, chunk_size=6)
        else:
            values = [*linear_logprobs(*leaves, labels, chunk_size=6)]
            loss = add(*values, slice(None)).sum()
        found += [loss, *values, *torch.autograd.grad(loss, leaves)]
    return [tensor.detach() for tensor in found]


def add(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    return logprobs + 0.5 * entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_that_agrees_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    planted = Planted()
    plant(monkeypatch, planted)
    results(dtype)
    # 3: the check's. The rest: 4 chunks, values and gradients, twice.
    assert planted.calls == 3 + 4 * 2 * 2 and not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("functions", "named"),
    [
        (Raises(), "failed: RuntimeError: no C compiler"),
        (LeavesOutTheLastBlock(), "(logsumexp) that are off"),
        (GivesNan(), "(entropy) that are off by nan"),
        (ForgetsTheEntropy(), "give a gradient that is off"),
        (DoesNotWrite(), "give a gradient that is off"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    functions: Planted,
    named: str,
    dtype: torch.dtype,
) -> None:
    """One warning, and what torch gives, bit for bit."""
    with monkeypatch.context() as context:
        context.setattr(row_functions, "USE_TRITON", False)
        expected = results(dtype)
    plant(monkeypatch, functions)
    with caplog.at_level(logging.WARNING):
        for got, value in zip(results(dtype), expected, strict=True):
            assert torch.equal(got, value)
        results(dtype)
    (record,) = caplog.records
    assert named in record.getMessage() and "Install the Triton" in record.getMessage()


def test_one_that_cannot_be_imported_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Planted:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(row_functions, "_load_triton", load)
    assert row_functions.row_functions(torch.zeros(2, 3)) is vocab_softmax
    assert "undefined symbol" in caplog.text


def test_no_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted()

    def load() -> Planted:
        if planted.calls == 0:
            planted.calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return planted

    monkeypatch.setattr(row_functions, "_load_triton", load)
    with pytest.raises(torch.OutOfMemoryError):
        row_functions.row_functions(torch.zeros(2, 3))
    assert row_functions.row_functions(torch.zeros(2, 3)) is planted
