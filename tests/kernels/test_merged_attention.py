"""The merge form against a dense float64 computation: output, gradients, memory, strides."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from easyrl.kernels.attention import merged_attention as merged
from easyrl.kernels.attention import partial_attention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import Backend
from tests.kernels.forests import FORESTS, output_and_gradients, random_forest, random_inputs
from tests.kernels.memory_recorder import LargestTensor

SCALE = 0.3
# Rows with segments beyond the length from which causal squares are halved on a CPU, 256.
LONG = {
    "long prompt": [(0, 700, -1), *((700 + 40 * i, 40, 0) for i in range(4))],
    "long responses": [(0, 30, -1), *((30 + 300 * i, 300, 0) for i in range(3)), (930, 257, 0)],
}
# Rounding of each dtype at sizes of about 1, times about ten for sums; gradients of keys sum
# over hundreds of queries.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}


def dense(query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float) -> Tensor:
    """The definition, in plain operations."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.mT * scale).masked_fill(~layout.dense_mask(query.device), float("-inf"))
    return scores.softmax(-1) @ value


def assert_is_dense(
    layout: SegmentLayout,
    inputs: list[Tensor],
    scale: float = SCALE,
    backend: Backend = merged.merged_attention,
) -> None:
    got = output_and_gradients(backend(*inputs, layout, scale), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(dense(*exact, layout, scale), exact)
    tolerance = TOLERANCES[inputs[0].dtype]
    for first, second in zip(got, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("forest", [*FORESTS, *LONG])
def test_is_the_definition(forest: str, kv_heads: int, dtype: torch.dtype) -> None:
    layout = SegmentLayout((FORESTS | LONG)[forest])
    assert_is_dense(layout, random_inputs(layout, kv_heads=kv_heads, dtype=dtype))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    num_segments=st.integers(1, 12),
    longest=st.integers(1, 12),
    halved_from=st.sampled_from([1, 2, 3, 8]),
    most_queries=st.sampled_from([1, 4, 20]),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_random_forests(
    seed: int,
    num_segments: int,
    longest: int,
    halved_from: int,
    most_queries: int,
    kv_heads: int,
) -> None:
    layout = SegmentLayout(random_forest(seed, num_segments, longest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged, "_LONGEST_CAUSAL_ON_CPU", halved_from)
        patch.setattr(merged, "_MOST_QUERIES_ON_CPU", most_queries)
        assert_is_dense(layout, random_inputs(layout, kv_heads=kv_heads))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    num_segments=st.integers(1, 12),
    longest=st.integers(1, 12),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_tokens_that_are_keys_alone(
    seed: int, num_segments: int, longest: int, kv_heads: int
) -> None:
    """The others' output and gradients are those of the whole row, and theirs is 0, not memory that
    was never written: a product with a gradient of 0 would make it NaN."""
    segments = random_forest(seed, num_segments, longest)
    draw = random.Random(seed)
    firsts = [draw.choice([0, draw.randint(0, length)]) for _, length, _ in segments]
    whole, layout = SegmentLayout(segments), SegmentLayout(segments, firsts)
    asked = torch.zeros(layout.num_tokens, dtype=torch.bool)
    for start, end in layout.query_stretches:
        asked[start:end] = True
    inputs = random_inputs(layout, kv_heads=kv_heads)
    output = merged.merged_attention(*inputs, layout, SCALE)
    assert bool((output[:, :, ~asked] == 0).all())
    got = output_and_gradients(output[:, :, asked], inputs)
    expected = output_and_gradients(dense(*inputs, whole, SCALE)[:, :, asked], inputs)
    for first, second in zip(got, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_queries", [1, 40, 300])
def test_plain_form_is_the_fused_one(
    causal: bool, num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on devices without a known fused kernel, on both sides of its row count, 256."""
    generator = torch.Generator().manual_seed(0)
    num_keys = num_queries if causal else 70
    q, grad = torch.randn(2, 2, 3, num_queries, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, num_keys, 8, generator=generator, dtype=torch.float64)
    # Another output and log-sum-exp than this block's own, as if there were further keys.
    lse = torch.randn(2, 3, num_queries, generator=generator, dtype=torch.float64).abs() + 6

    def both() -> list[Tensor]:
        output, own_lse = partial_attention.forward(q, k, v, causal, SCALE)
        return [
            output,
            own_lse,
            *partial_attention.backward(grad, q, k, v, q + 1, lse, causal, SCALE),
        ]

    fused = both()
    monkeypatch.setattr(partial_attention, "_kernel", lambda _: "rows")
    for first, second in zip(both(), fused, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("forest", [*FORESTS, "long prompt"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_any_device(forest: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "_kernel", lambda _: "rows")
    layout = SegmentLayout((FORESTS | LONG)[forest])
    assert_is_dense(layout, random_inputs(layout, dtype=dtype))


def test_any_strides() -> None:
    layout = SegmentLayout(LONG["long responses"])
    plain = random_inputs(layout)
    expected = output_and_gradients(merged.merged_attention(*plain, layout, SCALE), plain)

    def check(leaf: Tensor, view: Tensor) -> None:
        inputs = [leaf, *plain[1:]]
        output = merged.merged_attention(view, *plain[1:], layout, SCALE)
        for got, same in zip(output_and_gradients(output, inputs), expected, strict=True):
            torch.testing.assert_close(got.reshape(same.shape), same, rtol=0, atol=1e-12)

    contiguous = plain[0].detach().contiguous().requires_grad_()  # heads first in memory
    check(contiguous, contiguous)
    sliced = torch.cat([plain[0], plain[0]], 3).detach()[..., :8].requires_grad_()  # gaps
    check(sliced, sliced)
    backwards = plain[0].detach().mT.contiguous().mT.requires_grad_()  # last stride is not 1
    assert backwards.stride(3) != 1
    check(backwards, backwards)


def test_output_has_the_memory_that_projections_want() -> None:
    layout = SegmentLayout(FORESTS["ragged group"])
    output = merged.merged_attention(*random_inputs(layout), layout, SCALE)
    assert output.shape == (1, 4, layout.num_tokens, 8)
    assert output.transpose(1, 2).is_contiguous()


def test_inputs_are_left_alone_and_gradients_are_taken_once() -> None:
    layout = SegmentLayout(FORESTS["depth three"])
    inputs = random_inputs(layout)
    before = [x.detach().clone() for x in inputs]
    output = merged.merged_attention(*inputs, layout, SCALE)
    weights = torch.rand_like(output).requires_grad_()
    (first,) = torch.autograd.grad((output * weights).sum(), inputs[:1], create_graph=True)
    for now, then in zip(inputs, before, strict=True):
        assert torch.equal(now, then)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("kernel", ["cpu", "rows"])
def test_nothing_is_quadratic(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "_kernel", lambda _: kernel)
    layout = SegmentLayout([(0, 1024, -1), *((1024 + 256 * i, 256, 0) for i in range(4))])
    size = 8
    inputs = random_inputs(layout, heads=1, kv_heads=1, head_size=size, dtype=torch.float32)
    saved: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with LargestTensor() as recorder:
        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            output = merged.merged_attention(*inputs, layout, SCALE)
        torch.autograd.grad(output.sum(), inputs)
    tokens = layout.num_tokens
    assert sorted(saved) == sorted([tokens, *[tokens * size] * 4])
    # The fused kernel forms its scores in its own scratch memory, a few hundred rows at a time.
    assert recorder.numel <= (tokens * size if kernel == "cpu" else 256 * tokens) < tokens**2


@pytest.mark.parametrize("wrong", ["own log-sum-exp", "own output"])
def test_backward_needs_what_was_merged(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above does see a backward that takes a block's own results."""
    backward = partial_attention.backward

    def with_own(grad, q, k, v, out, lse, causal, scale):  # type: ignore[no-untyped-def]
        own_out, own_lse = partial_attention.forward(q, k, v, causal, scale)
        if wrong == "own output":
            return backward(grad, q, k, v, own_out, lse, causal, scale)
        return backward(grad, q, k, v, out, own_lse, causal, scale)

    monkeypatch.setattr(partial_attention, "backward", with_own)
    layout = SegmentLayout(FORESTS["ragged group"])
    with pytest.raises(AssertionError, match="not close"):
        assert_is_dense(layout, random_inputs(layout))
