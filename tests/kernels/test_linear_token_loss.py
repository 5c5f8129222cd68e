"""Per-token losses whose gradient is formed with the values, against whole logits in fp64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.kernels.logprobs.token_losses import TokenLoss
from tests.kernels.memory_recorder import PeakMemory
from tests.kernels.test_linear_logprob import NUM_TOKENS, VOCAB, inputs, whole


@functools.cache
def coefficients() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 1000, dtype=torch.float64, generator=generator)


def of_both(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    """Not linear, so that a gradient at another token's values shows."""
    by_logprob, by_entropy = coefficients()[:, : rows.stop][:, rows].to(logprobs)
    return by_logprob * logprobs.exp() + by_entropy * entropy**2


def of_logprobs(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    return coefficients()[0, rows].to(logprobs) * logprobs**2


def of_entropy(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    return coefficients()[1, rows].to(entropy) * entropy**2


@pytest.mark.parametrize("token_loss", [of_both, of_logprobs, of_entropy])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [1, 10, 1000])
def test_values_and_gradients(
    token_loss: TokenLoss, with_bias: bool, temperature: float, chunk_size: int
) -> None:
    hidden, weight, bias, labels = inputs()
    used_bias = bias if with_bias else None
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    loss, *values = linear_logprobs(
        hidden,
        weight,
        labels,
        token_loss,
        bias=used_bias,
        temperature=temperature,
        chunk_size=chunk_size,
    )
    expected = whole(hidden, weight, labels, used_bias, temperature)
    expected_loss = token_loss(*expected, slice(0, NUM_TOKENS)).sum()
    for first, second in zip((loss, *values), (expected_loss, *expected), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    assert not any(value.requires_grad for value in values)
    got = torch.autograd.grad(loss * 0.3, leaves)
    gradients = torch.autograd.grad(expected_loss * 0.3, leaves)
    for first, second in zip(got, gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-11)


def test_tied_weight_and_other_uses_add_up() -> None:
    """The weight is an embedding too, and the loss one of two terms."""
    _, weight, _, labels = inputs()

    def total(head) -> Tensor:  # type: ignore[no-untyped-def]
        hidden = torch.nn.functional.embedding(labels.flip(0), weight).tanh()
        return head(hidden) * 0.5 + weight.square().sum()

    def whole_head(hidden: Tensor) -> Tensor:
        values = whole(hidden, weight, labels, None, 1.0)
        return of_both(*values, slice(0, NUM_TOKENS)).sum()

    (got,) = torch.autograd.grad(
        total(lambda h: linear_logprobs(h, weight, labels, of_both, chunk_size=10)[0]), weight
    )
    (expected,) = torch.autograd.grad(total(whole_head), weight)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_frozen_inputs_get_no_gradient(trained: str) -> None:
    names = ("hidden", "weight", "bias")
    *floats, labels = inputs()
    expected = dict(zip(names, floats, strict=True))
    loss = linear_logprobs(*floats[:2], labels, of_both, bias=floats[2], chunk_size=10)[0]
    (gradient,) = torch.autograd.grad(loss, expected[trained])
    used = [x if name == trained else x.detach() for name, x in expected.items()]
    loss = linear_logprobs(*used[:2], labels, of_both, bias=used[2], chunk_size=10)[0]
    loss.backward()
    assert expected[trained].grad is not None and torch.equal(expected[trained].grad, gradient)
    assert all(x.grad is None for name, x in expected.items() if name != trained)


def test_a_frozen_weight_costs_no_memory_for_a_gradient() -> None:
    """As with LoRA."""
    hidden, weight, _, labels = inputs(torch.float32)
    with PeakMemory(hidden, weight, labels, coefficients()) as recorder:
        loss = linear_logprobs(hidden, weight.detach(), labels, of_both, chunk_size=4)[0]
        loss.backward()
    assert 4 * VOCAB <= recorder.peak < weight.numel()


def test_without_gradients_only_values() -> None:
    hidden, weight, _, labels = inputs()

    def no_gradient(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        assert not logprobs.requires_grad and not torch.is_grad_enabled()
        return of_both(logprobs, entropy, rows)

    expected = linear_logprobs(hidden, weight, labels, of_both, chunk_size=10)
    with torch.no_grad(), PeakMemory(hidden, weight, labels, coefficients()) as recorder:
        got = linear_logprobs(hidden, weight, labels, no_gradient, chunk_size=4)
    assert recorder.peak < weight.numel()
    for first, second in zip(got, expected, strict=True):
        torch.testing.assert_close(first, second.detach(), rtol=1e-12, atol=1e-12)
    got = linear_logprobs(hidden.detach(), weight.detach(), labels, of_both, chunk_size=10)
    assert not got[0].requires_grad


def test_same_as_recomputing_in_bf16() -> None:
    """Values are the same arithmetic; gradients are rounded at the same places."""
    gradients, values = [], []
    for same_pass in (True, False):
        hidden, weight, bias, labels = inputs(torch.bfloat16, num_tokens=200)
        settings = {"bias": bias, "temperature": 0.7, "chunk_size": 16}
        if same_pass:
            loss, *got = linear_logprobs(hidden, weight, labels, of_both, **settings)
        else:
            got = linear_logprobs(hidden, weight, labels, **settings)
            loss = of_both(*got, slice(0, 200)).sum()
        loss.backward()
        values.append(got)
        gradients.append([x.grad for x in (hidden, weight, bias)])
        assert all(x.grad.dtype == torch.bfloat16 for x in (hidden, weight, bias))
    for first, second in zip(*values, strict=True):
        assert first.dtype == torch.float32 and torch.equal(first, second)
    for first, second in zip(*gradients, strict=True):
        # The loss's own fp32 gradient may differ in a last bit, and with it a rounding to bf16.
        torch.testing.assert_close(first, second, rtol=2**-7, atol=1e-3)


def test_bf16_weight_gradient_is_rounded_once() -> None:
    """Scaled by 1/3 too: chunks of one token against one chunk, as in ``test_linear_logprob``."""
    gradients = {}
    for chunk_size in (1, 512):
        hidden, weight, _, labels = inputs(torch.bfloat16, num_tokens=512)
        loss = linear_logprobs(hidden, weight, labels, of_logprobs, chunk_size=chunk_size)[0]
        (loss / 3).backward()
        assert weight.grad is not None
        gradients[chunk_size] = weight.grad.double()
    error = (gradients[1] - gradients[512]).norm() / gradients[512].norm()
    assert error < 5e-3


@pytest.mark.parametrize("method", ["same_pass", "recompute", "whole"])
def test_two_chunks_of_logits_at_a_time(method: str) -> None:
    """Beyond the gradients: one chunk, as much work space, and a few numbers per token."""
    num_tokens, chunk_size = 400, 16
    hidden, weight, _, labels = inputs(torch.float32, num_tokens=num_tokens)
    rows = slice(0, num_tokens)
    with PeakMemory(hidden, weight, labels, coefficients()) as recorder:
        if method == "same_pass":
            loss = linear_logprobs(hidden, weight, labels, of_both, chunk_size=chunk_size)[0]
        elif method == "recompute":
            values = linear_logprobs(hidden, weight, labels, chunk_size=chunk_size)
            loss = of_both(*values, rows).sum()
        else:
            loss = of_both(*whole(hidden, weight, labels, None, 1.0), rows).sum()
        loss.backward()
    gradients = hidden.numel() + weight.numel()
    limit = gradients + 2 * chunk_size * VOCAB + 20 * num_tokens
    if method == "whole":  # the recorder sees it
        assert recorder.peak > 3 * num_tokens * VOCAB
    else:
        assert gradients + chunk_size * VOCAB <= recorder.peak <= limit


def test_broken_losses_go_through() -> None:
    """A NaN or infinite loss reaches the sum and the gradients for the trainer to see."""
    hidden, weight, _, labels = inputs()

    def one_is_broken(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        scale = torch.ones_like(logprobs)
        if rows.start == 10:
            scale[3] = torch.nan
        return scale * logprobs

    loss, logprobs, _ = linear_logprobs(hidden, weight, labels, one_is_broken, chunk_size=10)
    loss.backward()
    assert loss.isnan() and logprobs.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isnan().any(1).nonzero().flatten().tolist() == [13]

    def infinite(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return logprobs / 0.0

    assert linear_logprobs(hidden, weight, labels, infinite)[0] == -torch.inf


def test_no_tokens() -> None:
    hidden, weight, _, labels = inputs(num_tokens=0)
    loss, logprobs, entropy = linear_logprobs(hidden, weight, labels, of_both, chunk_size=8)
    assert loss == 0 and logprobs.shape == entropy.shape == (0,)
    loss.backward()
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("enabled", [True, False])
def test_wrong_losses_are_refused(enabled: bool) -> None:
    hidden, weight, _, labels = inputs()
    wrong: dict[str, TokenLoss] = {
        r"returned \(\) for a chunk of 10": lambda logprobs, entropy, rows: logprobs.sum(),
        r"returned \(10, 1\)": lambda logprobs, entropy, rows: logprobs[:, None],
        r"returned \(37,\)": lambda logprobs, entropy, rows: logprobs.new_zeros(NUM_TOKENS),
        r"returned float": lambda logprobs, entropy, rows: 0.0,  # type: ignore[dict-item,return-value]
    }
    with torch.set_grad_enabled(enabled):
        for message, token_loss in wrong.items():
            with pytest.raises(ValueError, match=message):
                linear_logprobs(hidden, weight, labels, token_loss, chunk_size=10)


def test_losses_without_gradient_are_refused() -> None:
    hidden, weight, _, labels = inputs()
    with pytest.raises(ValueError, match="depend on none"):
        linear_logprobs(hidden, weight, labels, lambda logprobs, *_: logprobs.detach())


def test_bad_arguments_are_refused() -> None:
    hidden, weight, _, labels = inputs()
    with pytest.raises(ValueError, match=r"\[N, H\] and int64 \[N\]"):
        linear_logprobs(hidden, weight, labels[:-1], of_both)
    with pytest.raises(ValueError, match="weight"):
        linear_logprobs(hidden, weight[:, :-1], labels, of_both)
    with pytest.raises(ValueError, match="bias"):
        linear_logprobs(hidden, weight, labels, of_both, bias=weight.new_zeros(VOCAB - 1))
    with pytest.raises(ValueError, match="temperature is -1"):
        linear_logprobs(hidden, weight, labels, of_both, temperature=-1.0)
    with pytest.raises(ValueError, match="chunk_size 0"):
        linear_logprobs(hidden, weight, labels, of_both, chunk_size=0)


def test_a_second_backward_is_refused() -> None:
    """The gradients are handed over, not kept."""
    hidden, weight, _, labels = inputs()
    loss = linear_logprobs(hidden, weight, labels, of_both)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="went backward before"):
        loss.backward()
