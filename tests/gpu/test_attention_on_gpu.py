"""Each attention backend on a GPU, forward and backward, against dense attention in fp64.

The dense attention is written out here: which tokens are seen is read off the segments one by one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from easyrl.kernels.attention import path_gather
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import load_backend
from tests.gpu.device import DEVICE, ON_CUDA, marks

pytestmark = marks

GROUP = [(0, 300, -1), *((300 + 64 * i, 64, 0) for i in range(8))]
DEEP = [(0, 200, -1), (200, 130, 0), (330, 70, 1), (400, 41, 1), (441, 90, 0), (531, 60, -1)]
ROWS = {"group": GROUP, "deep": DEEP}
# bf16: rounded products and probabilities, as for any fused kernel; fp32: TF32 is off by default
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = {
    "reference": (torch.float32, torch.bfloat16),
    "merged": (torch.float32, torch.bfloat16),
    "flex": (torch.float32, torch.bfloat16),
    "varlen": (torch.bfloat16,),
}
if not ON_CUDA:
    DTYPES = {name: DTYPES[name] for name in ("reference", "merged")}
CASES = [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes]


def seen_keys(segments: list[tuple[int, int, int]]) -> Tensor:
    """bool [T, T]."""
    total = segments[-1][0] + segments[-1][1]
    seen = torch.zeros(total, total, dtype=torch.bool)
    for start, length, parent in segments:
        for token in range(start, start + length):
            seen[token, start : token + 1] = True
        while parent >= 0:
            above, above_length, next_parent = segments[parent]
            seen[start : start + length, above : above + above_length] = True
            parent = next_parent
    return seen


def dense(
    query: Tensor, key: Tensor, value: Tensor, segments: list[tuple[int, int, int]], scale: float
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    scores = scores.masked_fill(~seen_keys(segments).to(scores.device), -torch.inf)
    return scores.softmax(-1) @ value


def random_tensors(segments: list[tuple[int, int, int]], kv_heads: int) -> list[Tensor]:
    """Query, key, value and the output's gradient, fp64, in a model's memory order."""
    generator = torch.Generator().manual_seed(len(segments))
    tokens = segments[-1][0] + segments[-1][1]
    shapes = [(1, tokens, heads, 64) for heads in (4, kv_heads, kv_heads, 4)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.transpose(1, 2).to(DEVICE) for x in drawn]


def assert_agrees(
    attend: object, dtype: torch.dtype, segments: list[tuple[int, int, int]], kv_heads: int
) -> None:
    *tensors, weights = (x.to(dtype) for x in random_tensors(segments, kv_heads))
    results = []
    for compute, precise in ((attend, False), (dense, True)):
        leaves = [(x.double() if precise else x).detach().requires_grad_() for x in tensors]
        row = segments if precise else SegmentLayout(segments)
        output = compute(*leaves, row, 0.125)  # type: ignore[operator]
        grads = torch.autograd.grad(output, leaves, weights.to(output.dtype))
        results.append([output.detach().double(), *(g.double() for g in grads)])
    for got, expected in zip(*results, strict=True):
        limit = TOLERANCES[dtype] * float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_agrees_with_dense_attention(
    backend: str, dtype: torch.dtype, row: str, kv_heads: int
) -> None:
    assert_agrees(load_backend(backend), dtype, ROWS[row], kv_heads)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_passes_the_check_at_first_use(backend: str, dtype: torch.dtype, row: str) -> None:
    """A backend that was named raises where it does not."""
    assert_agrees(CheckedAttention(backend), dtype, ROWS[row], 2)


@pytest.mark.skipif(not ON_CUDA, reason="varlen runs on CUDA")
@pytest.mark.parametrize("keys", [400, 1000])
def test_varlen_in_pieces(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_gather, "GATHERED_BYTES", keys * 2 * 2 * 64 * 2)
    for segments in ROWS.values():
        assert_agrees(load_backend("varlen"), torch.bfloat16, segments, 2)


@pytest.mark.skipif(not ON_CUDA, reason="varlen runs on CUDA")
def test_varlens_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose paths have 2.1 million keys: 4.3 GB of 8 heads of 64 if gathered at once."""
    segments = [(0, 8192, -1), *((8192 + 32 * i, 32, 0) for i in range(256))]
    shape = (1, 16384, 8, 64)
    tensors = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    layout = SegmentLayout(segments)
    load_backend("varlen")(*tensors, layout, 0.125)  # its index is made
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = load_backend("varlen")(*tensors, layout, 0.125)
    output.sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    row = tensors[0].numel() * 2
    assert peak < 3.5 * path_gather.GATHERED_BYTES + 20 * row, peak / 2**20


def test_dense_attention_sees_what_it_should() -> None:
    """Of a row of four tokens, by hand."""
    seen = seen_keys([(0, 2, -1), (2, 1, 0), (3, 1, 0)])
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
