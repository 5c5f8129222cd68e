"""The merge form over PyTorch's CUDA operators, with stand-ins for them on the CPU.

A stand-in takes what the operator's schema takes, asserts what its kernel expects, and computes
what it documents. What it returns for rounding up (log-sum-exps beyond the last query) is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from easyrl.kernels.attention import merged_attention as merged
from easyrl.kernels.attention import partial_attention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import reference_attention
from tests.kernels.forests import FORESTS, output_and_gradients, random_inputs

SCALE = 0.3
TILE = 32  # queries that log-sum-exps of the memory-efficient kernel are rounded up to
# Each kernel with a dtype that it is chosen for, and that dtype's rounding at sizes of about 1,
# times about ten for sums.
KERNELS = [("flash", torch.bfloat16, 6e-2), ("efficient", torch.float32, 2e-5)]
# Beyond a tile, and with batches of several stretches.
LONG = {"long": [(0, 70, -1), (70, 33, 0), (103, 33, 0), (136, 33, 0), (169, 40, -1), (209, 5, 4)]}
ALL = FORESTS | LONG


def scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    result = (query.double() @ key.double().mT) * scale
    if causal:
        seen = torch.ones(result.shape[-2:], dtype=torch.bool).tril()
        result = result.masked_fill(~seen, -torch.inf)
    return result


def output_and_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    s = scores(query, key, causal, scale)
    return (s.softmax(-1) @ value.double()).to(query.dtype), s.logsumexp(-1).float()


def gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (scores(query, key, causal, scale) - logsumexp.double()[..., None]).exp()
    grad = grad.double()
    dot = (grad * output.double()).sum(-1, keepdim=True)
    of_scores = weights * (grad @ value.double().mT - dot) * scale
    return (
        (of_scores @ key.double()).to(query.dtype),
        (of_scores.mT @ query.double()).to(key.dtype),
        (weights.mT @ grad).to(value.dtype),
    )


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.shape[1] == k.shape[1]
    assert dropout_p == 0.0 and not return_debug_mask
    output, logsumexp = output_and_logsumexp(q, k, v, is_causal, scale)
    empty, seed = torch.empty(0), torch.zeros(2, dtype=torch.uint64)
    return output, logsumexp, empty, empty, q.shape[2], k.shape[2], seed, empty, empty


def flash_backward(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    v,
    out,
    lse,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    seed,
    offset,
    *,
    scale,
):
    assert cum_q is None and cum_k is None and dropout_p == 0.0
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and grad.stride(-1) == 1
    assert lse.is_contiguous() and lse.dtype == torch.float32 and lse.shape == q.shape[:3]
    return gradients(grad, q, k, v, out, lse, is_causal, scale)


def efficient(  # type: ignore[no-untyped-def]
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0
    output, logsumexp = output_and_logsumexp(q, k, v, is_causal, scale)
    padded = F.pad(logsumexp, (0, -q.shape[2] % TILE), value=float("nan"))
    return output, padded, *torch.zeros(2, dtype=torch.int64).unbind(0)


def efficient_backward(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    v,
    attn_bias,
    out,
    lse,
    seed,
    offset,
    dropout_p,
    mask,
    is_causal=False,
    *,
    scale=None,
):
    assert attn_bias is None and dropout_p == 0.0 and list(mask) == [True, True, True, False]
    assert lse.shape[2] == q.shape[2] + -q.shape[2] % TILE and lse.is_contiguous()
    assert torch.isinf(lse[..., q.shape[2] :]).all()  # so that added queries weigh 0
    return (*gradients(grad, q, k, v, out, lse[..., : q.shape[2]], is_causal, scale), None)


@pytest.fixture
def cuda_operators_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(merged, "_limits", lambda device: (None, None))  # as on a GPU
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
        library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
        yield


def largest_error(layout: SegmentLayout, dtype: torch.dtype, kv_heads: int) -> float:
    """Of output and gradients, to fp64, relative to the largest entry where that is above 1."""
    inputs = random_inputs(layout, kv_heads=kv_heads, dtype=dtype)
    got = output_and_gradients(merged.merged_attention(*inputs, layout, SCALE), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(reference_attention(*exact, layout, SCALE), exact)
    return max(
        float((first - second).abs().max()) / max(1.0, float(second.abs().max()))
        for first, second in zip(got, expected, strict=True)
    )


@pytest.mark.usefixtures("cuda_operators_on_cpu")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("forest", ALL)
@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), KERNELS)
def test_agrees_with_float64(
    kernel: str,
    dtype: torch.dtype,
    tolerance: float,
    forest: str,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partial_attention, "_kernel", lambda query: kernel)
    assert largest_error(SegmentLayout(ALL[forest]), dtype, kv_heads) < tolerance


@pytest.mark.usefixtures("cuda_operators_on_cpu")
@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), KERNELS)
def test_a_wrong_argument_is_noticed(
    kernel: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_attention, "_kernel", lambda query: kernel)
    forward = partial_attention.forward
    monkeypatch.setattr(
        partial_attention, "forward", lambda q, k, v, causal, s: forward(q, k, v, False, s)
    )
    assert largest_error(SegmentLayout(LONG["long"]), dtype, 2) > 2 * tolerance


@pytest.mark.parametrize(
    ("dtype", "head_size", "capability", "kernel"),
    [
        (torch.bfloat16, 64, (8, 0), "flash"),
        (torch.float16, 256, (9, 0), "flash"),
        (torch.bfloat16, 60, (9, 0), "rows"),
        (torch.bfloat16, 264, (9, 0), "rows"),
        (torch.bfloat16, 64, (7, 5), "rows"),
        (torch.float32, 64, (7, 0), "efficient"),
        (torch.float32, 62, (9, 0), "rows"),
        (torch.float64, 64, (9, 0), "rows"),
    ],
)
def test_choice_on_cuda(
    dtype: torch.dtype,
    head_size: int,
    capability: tuple[int, int],
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnCuda:
        device, shape = torch.device("cuda", 0), (1, 4, 10, head_size)

    OnCuda.dtype = dtype  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert partial_attention._kernel(OnCuda()) == kernel  # type: ignore[arg-type]
