"""Soft-capped logits: values and gradients against plain torch in fp64."""

import pytest
import torch
from torch import Tensor

from easyrl.kernels.logprobs.linear_divergence import TeacherRows, linear_divergences
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs

CAP, TEMPERATURE = 1.5, 0.7


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden, weight, bias = (torch.randn(*shape).double() for shape in [(13, 8), (19, 8), (19,)])
    return *(x.requires_grad_() for x in (hidden, weight, bias)), torch.randint(19, (13,))


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, cap: float) -> Tensor:
    """Log-distributions [N, V]."""
    logits = cap * torch.tanh((hidden @ weight.t() + bias) / cap)
    return (logits / TEMPERATURE).log_softmax(-1)


def test_values_and_gradients_go_through_the_cap():
    hidden, weight, bias, labels = tensors()
    logp = plain(hidden, weight, bias, CAP)
    expected = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    factor = torch.linspace(0.5, 2, 13).double()

    def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return factor[rows] * logprobs**2 + entropy

    wanted = torch.autograd.grad(loss(*expected, slice(None)).sum(), (hidden, weight, bias))
    settings = {"bias": bias, "temperature": TEMPERATURE, "chunk_size": 5, "soft_cap": CAP}
    values = linear_logprobs(hidden, weight, labels, **settings)
    again = torch.autograd.grad(loss(*values, slice(None)).sum(), (hidden, weight, bias))
    total, *same = linear_logprobs(hidden, weight, labels, loss, **settings)
    formed = torch.autograd.grad(total, (hidden, weight, bias))
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tuple(same), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(formed, wanted, rtol=1e-11, atol=1e-12)
    uncapped = linear_logprobs(hidden, weight, labels, **(settings | {"soft_cap": None}))
    assert float((uncapped[0] - values[0]).detach().abs().max()) > 0.1  # the cap is felt


@pytest.mark.parametrize("caps", [(CAP, None), (None, 2.0), (CAP, 2.0)])
@pytest.mark.parametrize("divisor", [1.0, 4.0])
def test_divergence_of_capped_heads(caps: tuple[float | None, float | None], divisor: float):
    hidden, weight, bias, labels = tensors()
    its = [x.detach() for x in tensors(1)[:3]]
    own_cap, its_cap = (1e9 if cap is None else cap for cap in caps)
    p = plain(hidden, weight, bias, own_cap)
    q = plain(*(x / y for x, y in zip(its, (divisor, 1, divisor), strict=True)), its_cap / divisor)
    expected = p.gather(1, labels[:, None])[:, 0], (p.exp() * (p - q)).sum(-1)
    wanted = torch.autograd.grad(
        expected[0].sum() + 2 * (expected[1] ** 2).sum(), (hidden, weight, bias)
    )

    def loss(logprobs: Tensor, _: Tensor, rows: slice, divergence: Tensor) -> Tensor:
        return logprobs + 2 * divergence**2

    teacher = TeacherRows(*its, caps[1]).divided(divisor)
    settings = {"bias": bias, "temperature": TEMPERATURE, "chunk_size": 5, "soft_cap": caps[0]}
    logprobs, _, divergence = linear_divergences(hidden, weight, labels, teacher, **settings)
    again = torch.autograd.grad(logprobs.sum() + 2 * (divergence**2).sum(), (hidden, weight, bias))
    total = linear_divergences(hidden, weight, labels, teacher, loss, **settings)[0]
    formed = torch.autograd.grad(total, (hidden, weight, bias))
    torch.testing.assert_close((logprobs, divergence), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again, wanted, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(formed, wanted, rtol=1e-8, atol=1e-9)


def test_a_cap_has_to_be_positive():
    hidden, weight, _, labels = tensors()
    with pytest.raises(ValueError, match="soft_cap is 0"):
        linear_logprobs(hidden, weight, labels, soft_cap=0.0)
