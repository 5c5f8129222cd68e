"""Tensors as decoder layers have them, and what layers give on them in fp64.

The formulas are written out again, by complex numbers and matrices, and share nothing with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOKENS, HEADS, KV_HEADS, SIZE, WIDTH = 37, 4, 2, 16, 48


def inputs(layer: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Of ``layer``, without its numbers; heads' tensors are transposed, as a model's are."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    if layer == "rms_norm":
        return [draw(1, TOKENS, WIDTH), 1 + 0.1 * draw(WIDTH)]
    if layer == "swiglu":
        return [draw(1, TOKENS, WIDTH), draw(1, TOKENS, WIDTH)]
    positions = torch.randint(0, 50, (TOKENS, 1), generator=generator).double()
    angles = positions * 100 ** (-torch.arange(SIZE // 2).double() / (SIZE // 2))
    double = torch.cat([angles, angles], dim=1)[None].to(device)
    heads = [draw(1, TOKENS, n, SIZE).transpose(1, 2) for n in (HEADS, KV_HEADS)]
    return [*heads, double.cos().to(dtype), double.sin().to(dtype)]


def others(layer: str) -> tuple[float, ...]:
    return (1e-5,) if layer == "rms_norm" else ()


def exact(layer: str, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """In fp64."""
    if layer == "rms_norm":
        x, weight = tensors
        return (x @ torch.diag(weight) / ((x * x).sum(-1, keepdim=True) / WIDTH + 1e-5).sqrt(),)
    if layer == "swiglu":
        gate, up = tensors
        return (gate * up / (1 + (-gate).exp()),)
    query, key, cos, sin = tensors
    half = SIZE // 2
    turn = torch.complex(cos[..., :half], sin[..., :half])
    turned = []
    for x in (query, key):
        y = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        turned.append(torch.cat([y.real, y.imag], dim=-1))
    return tuple(turned)


def outputs_and_gradients(compute: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """In the first two tensors, of a fixed weighting of the outputs; all in fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:2]]
    found = compute(*(x * 1 for x in leaves), *tensors[2:])
    found = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in found]
    results = [x.detach().clone() for x in found]
    grads = torch.autograd.grad(
        found, leaves, [w.to(x) for w, x in zip(weights, found, strict=True)]
    )
    return [x.double() for x in (*results, *grads)]


def assert_exact(
    layer: str, compute: Callable[..., Any], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Output and gradients of ``compute`` against fp64, relative to the largest entry."""
    tensors = inputs(layer, dtype, device)
    got = outputs_and_gradients(lambda *t: compute(*t, *others(layer)), tensors)
    expected = outputs_and_gradients(
        lambda *t: exact(layer, list(t)), [x.double() for x in tensors]
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for tensor, right in zip(got, expected, strict=True):
        limit = tolerance * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(tensor, right, rtol=0, atol=limit)
