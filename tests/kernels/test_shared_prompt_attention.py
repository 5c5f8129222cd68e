"""Attention over a forest of segments against a loop over its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import BACKENDS, load_backend

Triples = list[tuple[int, int, int]]
PROMPT_WITH_RESPONSES: Triples = [(0, 5, -1), (5, 3, 0), (8, 1, 0), (9, 4, 0)]
TWO_GROUPS: Triples = [(0, 2, -1), (2, 3, 0), (5, 4, -1), (9, 2, 2), (11, 1, 2)]
TREE_OF_DEPTH_THREE: Triples = [(0, 3, -1), (3, 2, 0), (5, 2, 1), (7, 1, 2), (8, 2, 1), (10, 3, 0)]
# The others have tests of their own, over what stands in for their device.
ON_CPU = [name for name in BACKENDS if name not in ("varlen", "npu")]
ON_ANY_DEVICE = ["reference", "merged"]
FORESTS = [PROMPT_WITH_RESPONSES, TWO_GROUPS, TREE_OF_DEPTH_THREE, [(0, 1, -1)]]


def visible(segments: Triples, query: int) -> list[int]:
    """The keys that the token at row position ``query`` sees, by walking up its branch."""
    (index,) = (
        i for i, (start, length, _) in enumerate(segments) if start <= query < start + length
    )
    keys = list(range(segments[index][0], query + 1))
    while (index := segments[index][2]) != -1:
        start, length, _ = segments[index]
        keys += range(start, start + length)
    return sorted(keys)


def attention_by_loop(
    query: Tensor, key: Tensor, value: Tensor, segments: Triples, scale: float
) -> Tensor:
    output = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        for token in range(query.shape[2]):
            keys = visible(segments, token)
            scores = key[0, head // group, keys] @ query[0, head, token] * scale
            output[0, head, token] = scores.softmax(0) @ value[0, head // group, keys]
    return output


def random_inputs(
    num_tokens: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, head_size: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(num_heads: int) -> Tensor:
        shape = (1, num_heads, num_tokens, head_size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw(heads), draw(kv_heads), draw(kv_heads)


@pytest.mark.parametrize("segments", FORESTS)
def test_dense_mask_is_the_definition(segments: Triples) -> None:
    layout = SegmentLayout(segments)
    mask = layout.dense_mask(torch.device("cpu"))
    assert mask.dtype == torch.bool
    assert [row.nonzero().squeeze(1).tolist() for row in mask] == [
        visible(segments, query) for query in range(layout.num_tokens)
    ]
    assert layout.dense_mask(torch.device("cpu")) is mask  # built once for all layers and models


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("segments", FORESTS)
@pytest.mark.parametrize(
    # rounding of each dtype, times about ten for the sums
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)],
)
def test_output_is_the_definition(
    backend: str, kv_heads: int, segments: Triples, dtype: torch.dtype, tolerance: float
) -> None:
    layout = SegmentLayout(segments)
    inputs = random_inputs(layout.num_tokens, dtype, kv_heads=kv_heads)
    output = load_backend(backend)(*inputs, layout, 1 / math.sqrt(8))
    query, key, value = (x.double() for x in inputs)
    expected = attention_by_loop(query, key, value, segments, scale=1 / math.sqrt(8))
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", ON_CPU)
def test_gradients_and_scale(backend: str) -> None:
    layout = SegmentLayout(TREE_OF_DEPTH_THREE)
    inputs = [x.requires_grad_() for x in random_inputs(layout.num_tokens, torch.float64)]
    weights = torch.randn(1, 4, layout.num_tokens, 8, dtype=torch.float64)
    output = load_backend(backend)(*inputs, layout, 0.2)
    got = torch.autograd.grad((output * weights).sum(), inputs)
    by_loop = attention_by_loop(*inputs, TREE_OF_DEPTH_THREE, scale=0.2)
    expected = torch.autograd.grad((by_loop * weights).sum(), inputs)
    for gradient, expected_gradient in zip(got, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_can_be_loaded_anywhere(name: str) -> None:
    """Their own packages are asked for when they run, not before."""
    assert callable(load_backend(name))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "at least one segment"),
        ([(0, 2, -1), (3, 2, 0)], r"segments\[1\] is \(start 3, length 2\).*from 2 here"),
        ([(0, 2, -1), (2, 0, 0)], r"segments\[1\].*at least one token"),
        ([(0, 2, 0)], r"segments\[0\] has parent 0"),
        ([(0, 2, -1), (2, 2, 2), (4, 1, 0)], r"segments\[1\] has parent 2"),
        (
            [(0, 2, -1), (2, 1, 0), (3, 1, 0), (4, 1, 1)],
            r"segments\[3\].*order segments depth first",
        ),
        ([(0, 2, -2)], r"segments\[0\] has parent -2"),
    ],
)
def test_impossible_forests_are_refused(segments: Triples, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentLayout(segments)


def test_wrong_shapes_and_names_are_refused() -> None:
    layout = SegmentLayout(PROMPT_WITH_RESPONSES)
    with pytest.raises(ValueError, match="one row of 13 tokens"):
        CheckedAttention()(*random_inputs(12, torch.float32), layout)
    with pytest.raises(ValueError, match="one row of 13 tokens"):
        two_rows = [x.repeat(2, 1, 1, 1) for x in random_inputs(13, torch.float32)]
        CheckedAttention()(*two_rows, layout)
    with pytest.raises(ValueError, match="'flash'; it is one of auto, reference"):
        CheckedAttention("flash")
