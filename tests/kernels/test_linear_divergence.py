"""Chunked KL(student || teacher) against the whole logits of both, in fp64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from easyrl.kernels.logprobs.linear_divergence import TeacherRows, linear_divergences
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.kernels.logprobs.token_losses import DivergenceLoss
from tests.kernels.memory_recorder import PeakMemory
from tests.kernels.test_linear_logprob import NUM_TOKENS, VOCAB, inputs
from tests.kernels.test_linear_logprob import whole as whole_logprobs

TEACHER_HIDDEN = 20  # the student's is 12


def teacher_of(
    dtype: torch.dtype = torch.float64, num_tokens: int = NUM_TOKENS, *, with_bias: bool = True
) -> TeacherRows:
    generator = torch.Generator().manual_seed(5)
    shapes = [(num_tokens, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN), (VOCAB,)]
    hidden, weight, bias = (
        0.7 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return TeacherRows(hidden.to(dtype), weight.to(dtype), bias.to(dtype) if with_bias else None)


def whole(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    teacher: TeacherRows,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and divergences from logits that are held whole."""
    logp = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    its = torch.nn.functional.linear(teacher.hidden, teacher.weight, teacher.bias) / temperature
    divergence = (logp.exp() * (logp - its.log_softmax(-1))).sum(-1)
    return *whole_logprobs(hidden, weight, labels, bias, temperature), divergence


@functools.cache
def coefficients() -> Tensor:
    return torch.randn(3, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def of_all(logprobs: Tensor, entropy: Tensor, rows: slice, divergence: Tensor) -> Tensor:
    """Not linear, so that a gradient at another token's values shows."""
    by_logprob, by_entropy, by_divergence = coefficients()[:, : rows.stop][:, rows].to(logprobs)
    return by_logprob * logprobs.exp() + by_entropy * entropy**2 + by_divergence * divergence**2


def of_divergence(logprobs: Tensor, entropy: Tensor, rows: slice, divergence: Tensor) -> Tensor:
    return coefficients()[2, rows].to(divergence) * divergence**2


def of_logprobs(logprobs: Tensor, entropy: Tensor, rows: slice, divergence: Tensor) -> Tensor:
    return coefficients()[0, rows].to(logprobs) * logprobs**2


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
@pytest.mark.parametrize("chunk_size", [1, 10, 1000])
def test_values_and_gradients(with_bias: bool, temperature: float, chunk_size: int) -> None:
    """Through each value alone and all of them, from logits that are computed again."""
    hidden, weight, bias, labels = inputs()
    used_bias, teacher = bias if with_bias else None, teacher_of(with_bias=not with_bias)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    settings = {"temperature": temperature, "chunk_size": chunk_size}
    got = linear_divergences(hidden, weight, labels, teacher, bias=used_bias, **settings)
    expected = whole(hidden, weight, labels, used_bias, teacher, temperature)
    for first, second in zip(got, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    own = coefficients()[:, :NUM_TOKENS]
    for picked in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        losses = [sum((side[i] * own[i]).sum() for i in picked) for side in (got, expected)]
        gradients = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses]
        for first, second in zip(*gradients, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=1e-11)


@pytest.mark.parametrize("token_loss", [of_all, of_divergence, of_logprobs])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [1, 10, 1000])
def test_a_loss_whose_gradient_is_formed_with_the_values(
    token_loss: DivergenceLoss, temperature: float, chunk_size: int
) -> None:
    hidden, weight, bias, labels = inputs()
    teacher = teacher_of()
    loss, *values = linear_divergences(
        *(hidden, weight, labels, teacher, token_loss),
        bias=bias,
        temperature=temperature,
        chunk_size=chunk_size,
    )
    expected = whole(hidden, weight, labels, bias, teacher, temperature)
    expected_loss = token_loss(*expected[:2], slice(0, NUM_TOKENS), expected[2]).sum()
    for first, second in zip((loss, *values), (expected_loss, *expected), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    assert not any(value.requires_grad for value in values)
    leaves = [hidden, weight, bias]
    gradients = [torch.autograd.grad(0.3 * each, leaves) for each in (loss, expected_loss)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("same_pass", [True, False])
def test_the_gradient_is_the_student_s_alone(same_pass: bool) -> None:
    """Also where the teacher's tensors would take one, and where the student's weight is frozen."""
    hidden, weight, _, labels = inputs()
    teacher = teacher_of()
    for tensor in (teacher.hidden, teacher.weight, teacher.bias):
        assert tensor is not None
        tensor.requires_grad_()
    loss_of = of_divergence if same_pass else None
    got = linear_divergences(hidden, weight.detach(), labels, teacher, loss_of, chunk_size=10)
    loss = got[0] if same_pass else of_divergence(*got[:2], slice(0, NUM_TOKENS), got[2]).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is None
    assert teacher.hidden.grad is None and teacher.weight.grad is None


def test_a_distribution_is_no_distance_from_itself() -> None:
    """Exactly: the differences are taken before the sum. So is the gradient."""
    hidden, weight, bias, labels = inputs(torch.float32)
    teacher = TeacherRows(hidden.detach(), weight.detach(), bias.detach())
    divergence = linear_divergences(hidden, weight, labels, teacher, bias=bias, chunk_size=8)[2]
    divergence.sum().backward()
    assert not divergence.any()
    assert hidden.grad is not None and not hidden.grad.any()


def test_small_divergences_in_fp32() -> None:
    """4e-5 nats of a student next to its teacher; rounding of fp32 logits is about 1e-7 of them."""
    hidden, weight, _, labels = inputs(torch.float32)
    shifted = weight.detach() + 3e-3 * torch.randn(weight.shape, generator=torch.manual_seed(0))
    teacher = TeacherRows(hidden.detach(), shifted)
    got = linear_divergences(hidden, weight, labels, teacher, chunk_size=8)[2].double()
    exact = TeacherRows(hidden.detach().double(), shifted.double())
    expected = whole(hidden.double(), weight.double(), labels, None, exact, 1.0)[2]
    assert 1e-6 < expected.mean() < 1e-4
    torch.testing.assert_close(got.sum(), expected.sum(), rtol=0.02, atol=0)


def test_bf16_values_are_fp32_and_gradients_rounded_once() -> None:
    """Against fp64 of the same 16-bit numbers, whose logits have 8 bits; two ways, one result."""
    gradients = []
    for same_pass in (True, False):
        hidden, weight, _, labels = inputs(torch.bfloat16, num_tokens=200)
        teacher = teacher_of(torch.bfloat16, 200, with_bias=False)
        loss_of = of_divergence if same_pass else None
        got = linear_divergences(hidden, weight, labels, teacher, loss_of, chunk_size=16)
        divergence = got[-1]
        loss = got[0] if same_pass else of_divergence(*got[:2], slice(0, 200), divergence).sum()
        loss.backward()
        assert divergence.dtype == torch.float32
        gradients.append([hidden.grad, weight.grad])
    exact = TeacherRows(teacher.hidden.double(), teacher.weight.double())
    expected = whole(hidden.double(), weight.double(), labels, None, exact, 1.0)[2]
    torch.testing.assert_close(divergence.double(), expected, rtol=0.05, atol=0.1)
    for first, second in zip(*gradients, strict=True):
        assert first is not None and first.dtype == torch.bfloat16
        torch.testing.assert_close(first, second, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("method", ["same_pass", "recompute", "whole"])
def test_three_chunks_of_logits_at_a_time(method: str) -> None:
    """Beyond the gradients: a chunk of each model, as much work space as one, and a few numbers per
    token."""
    num_tokens, chunk_size = 400, 16
    hidden, weight, _, labels = inputs(torch.float32, num_tokens=num_tokens)
    teacher = teacher_of(torch.float32, num_tokens, with_bias=False)
    held = hidden, weight, labels, teacher.hidden, teacher.weight, coefficients()
    with PeakMemory(*held) as recorder:
        if method == "same_pass":
            loss = linear_divergences(
                hidden, weight, labels, teacher, of_all, chunk_size=chunk_size
            )[0]
        else:
            if method == "recompute":
                values = linear_divergences(hidden, weight, labels, teacher, chunk_size=chunk_size)
            else:
                values = whole(hidden, weight, labels, None, teacher, 1.0)
            loss = of_all(*values[:2], slice(0, num_tokens), values[2]).sum()
        loss.backward()
    gradients = hidden.numel() + weight.numel()
    limit = gradients + 3 * chunk_size * VOCAB + 30 * num_tokens
    if method == "whole":  # the recorder sees it
        assert recorder.peak > 4 * num_tokens * VOCAB
    else:
        assert gradients + 2 * chunk_size * VOCAB <= recorder.peak <= limit


def test_values_besides_the_divergence_are_those_of_linear_logprobs() -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    settings = {"bias": bias, "temperature": 0.7, "chunk_size": 16}
    got = linear_divergences(hidden, weight, labels, teacher_of(torch.float32), **settings)
    for first, second in zip(
        got[:2], linear_logprobs(hidden, weight, labels, **settings), strict=True
    ):
        assert torch.equal(first, second)


def test_without_gradients_only_values() -> None:
    hidden, weight, _, labels = inputs()
    teacher = teacher_of(with_bias=False)
    held = hidden, weight, labels, teacher.hidden, teacher.weight, coefficients()
    with torch.no_grad(), PeakMemory(*held) as recorder:
        got = linear_divergences(hidden, weight, labels, teacher, of_all, chunk_size=2)
    assert recorder.peak < weight.numel() and not got[0].requires_grad


def test_no_tokens() -> None:
    hidden, weight, _, labels = inputs(num_tokens=0)
    loss, *values = linear_divergences(
        hidden, weight, labels, teacher_of(num_tokens=0), of_all, chunk_size=8
    )
    assert loss == 0 and [len(value) for value in values] == [0, 0, 0]
    loss.backward()
    assert weight.grad is not None and not weight.grad.any()


def test_bad_arguments_are_refused() -> None:
    hidden, weight, _, labels = inputs()
    teacher = teacher_of()
    shorter = TeacherRows(teacher.hidden[:-1], teacher.weight)
    smaller = TeacherRows(teacher.hidden, teacher.weight[:-1])
    with pytest.raises(ValueError, match=r"teacher has 36 positions and a vocabulary of 301"):
        linear_divergences(hidden, weight, labels, shorter)
    with pytest.raises(ValueError, match=r"teacher has 37 positions and a vocabulary of 300"):
        linear_divergences(hidden, weight, labels, smaller)
    with pytest.raises(ValueError, match=r"have to be \[V, 20\]"):
        linear_divergences(
            hidden, weight, labels, TeacherRows(teacher.hidden, teacher.weight[:, :-1])
        )
    with pytest.raises(ValueError, match="temperature is 0"):
        linear_divergences(hidden, weight, labels, teacher, temperature=0.0)


def test_a_second_backward_is_refused() -> None:
    hidden, weight, _, labels = inputs()
    loss = linear_divergences(hidden, weight, labels, teacher_of(), of_all)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="went backward before"):
        loss.backward()
