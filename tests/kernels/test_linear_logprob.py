"""Chunked log-probabilities and entropies against ``log_softmax`` of the whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from tests.kernels.memory_recorder import LargestTensor

NUM_TOKENS, HIDDEN, VOCAB = 37, 12, 301


def inputs(dtype: torch.dtype = torch.float64, num_tokens: int = NUM_TOKENS) -> list[Tensor]:
    """hidden, weight, bias (require gradients) and labels."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(num_tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]
    floats = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    return [*(x.requires_grad_() for x in floats), labels]


def whole(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logp = logits.log_softmax(-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
@pytest.mark.parametrize("chunk_size", [1, 10, NUM_TOKENS, 1000])
def test_values_and_gradients(with_bias: bool, temperature: float, chunk_size: int) -> None:
    hidden, weight, bias, labels = inputs()
    used_bias = bias if with_bias else None
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    got = linear_logprobs(
        hidden, weight, labels, bias=used_bias, temperature=temperature, chunk_size=chunk_size
    )
    expected = whole(hidden, weight, labels, used_bias, temperature)
    coefficients = torch.randn(2, NUM_TOKENS, dtype=torch.float64)
    for first, second in zip(got, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    for picked in ((0,), (1,), (0, 1)):  # gradients through either output alone, and both
        losses = [
            sum((side[i] * coefficients[i]).sum() for i in picked) for side in (got, expected)
        ]
        gradients = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses]
        for first, second in zip(*gradients, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_frozen_inputs_get_no_gradient() -> None:
    hidden, weight, _, labels = inputs()
    logprobs, _ = linear_logprobs(hidden, weight.detach(), labels, chunk_size=8)
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None
    logprobs, entropy = linear_logprobs(hidden.detach(), weight.detach(), labels, chunk_size=8)
    assert not logprobs.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # fp32: its rounding, summed over 301 entries. bf16: logits of about 10 are rounded to 8 bits.
    [(torch.float32, 1e-5), (torch.bfloat16, 0.1)],
)
def test_softmax_is_at_least_fp32(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, _, labels = inputs(dtype)
    got = linear_logprobs(hidden, weight, labels, chunk_size=8)
    expected = whole(hidden.double(), weight.double(), labels, None, 1.0)
    (got[0] + got[1]).sum().backward()
    for first, second in zip(got, expected, strict=True):
        assert first.dtype == torch.float32
        torch.testing.assert_close(first.double(), second, rtol=0, atol=tolerance)
    assert hidden.grad is not None and hidden.grad.dtype == dtype
    assert weight.grad is not None and weight.grad.dtype == dtype


def test_bf16_weight_gradient_is_rounded_once() -> None:
    """512 chunks of one token: adding them up in bf16 would lose whole per cents."""
    hidden, weight, _, labels = inputs(torch.bfloat16, num_tokens=512)
    gradients = {}
    for chunk_size in (1, 512):
        weight.grad = None
        linear_logprobs(hidden, weight, labels, chunk_size=chunk_size)[0].sum().backward()
        assert weight.grad is not None
        gradients[chunk_size] = weight.grad.double()
    # Each token's product is bf16 on its own, errors of 2^-9 average out; measured 0.002.
    error = (gradients[1] - gradients[512]).norm() / gradients[512].norm()
    assert error < 5e-3


def test_logits_are_never_held_whole() -> None:
    num_tokens, chunk_size = 200, 16
    hidden, weight, _, labels = inputs(torch.float32, num_tokens=num_tokens)

    def largest(compute) -> int:  # type: ignore[no-untyped-def]
        with LargestTensor() as recorder:
            logprobs, entropy = compute()
            (logprobs + entropy).sum().backward()
        return recorder.numel

    chunk, weights = chunk_size * VOCAB, weight.numel()
    used = largest(lambda: linear_logprobs(hidden, weight, labels, chunk_size=chunk_size))
    assert used == max(chunk, weights) < num_tokens * VOCAB
    # The recorder sees backward passes too: the whole computation is caught.
    assert largest(lambda: whole(hidden, weight, labels, None, 1.0)) == num_tokens * VOCAB


def test_saved_for_backward_is_small() -> None:
    """Between the passes only the inputs and a few numbers per token live on."""
    hidden, weight, _, labels = inputs(torch.float32, num_tokens=200)
    saved: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        linear_logprobs(hidden, weight, labels, chunk_size=16)
    assert sorted(saved) == sorted([hidden.numel(), weight.numel(), 200, 200, 200])


def test_no_tokens() -> None:
    hidden, weight, _, labels = inputs(num_tokens=0)
    logprobs, entropy = linear_logprobs(hidden, weight, labels, chunk_size=8)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_bad_arguments_are_refused() -> None:
    hidden, weight, _, labels = inputs()
    with pytest.raises(ValueError, match=r"\[N, H\] and int64 \[N\]"):
        linear_logprobs(hidden, weight, labels[:-1])
    with pytest.raises(ValueError, match=r"labels torch.int32"):
        linear_logprobs(hidden, weight, labels.int())
    with pytest.raises(ValueError, match="temperature is 0"):
        linear_logprobs(hidden, weight, labels, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_size 0"):
        linear_logprobs(hidden, weight, labels, chunk_size=0)
