"""FlexAttention over a forest of segments: its block mask, and what it computes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from easyrl.kernels.attention import flex_attention as flex_module
from easyrl.kernels.attention.flex_attention import (
    BLOCK_SIZE,
    compiled_attention,
    flex_attention_backend,
    layout_block_mask,
    padded_length,
    subtree_ends,
)
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import reference_attention
from tests.kernels.forests import (
    FORESTS,
    Triples,
    output_and_gradients,
    random_forest,
    random_inputs,
)

CPU = torch.device("cpu")
SCALE = 0.3
# Segments of some blocks, of parts of one, and with ends on a block's border.
LONG_FORESTS: dict[str, Triples] = {
    "group": [(0, 300, -1), (300, 84, 0), (384, 128, 0), (512, 7, 0)],
    "two groups": [(0, 256, -1), (256, 100, 0), (356, 28, -1), (384, 200, 2), (584, 40, 2)],
    "random": random_forest(seed=5, num_segments=12, longest=150),
    "many": random_forest(seed=6, num_segments=90, longest=9),
}
ALL_FORESTS = FORESTS | LONG_FORESTS


@pytest.mark.parametrize("name", ALL_FORESTS)
def test_one_number_per_key_says_who_sees_it(name: str) -> None:
    layout = SegmentLayout(ALL_FORESTS[name])
    ends = subtree_ends(layout)
    position = torch.arange(len(ends))
    visible = (position[None, :] <= position[:, None]) & (position[:, None] < ends[None, :])
    row = slice(layout.num_tokens)
    assert torch.equal(visible[row, row], layout.dense_mask(CPU))
    # Padding sees itself alone, and nothing else sees it.
    visible[row, row] = False
    visible.fill_diagonal_(False)
    assert not visible.any()


@pytest.mark.parametrize("name", ALL_FORESTS)
def test_block_mask_is_what_the_dense_way_finds(name: str) -> None:
    layout = SegmentLayout(ALL_FORESTS[name])
    mask = layout_block_mask(layout, CPU)
    length = padded_length(layout.num_tokens)
    expected = create_block_mask(mask.mask_mod, 1, 1, length, length, "cpu", BLOCK_SIZE)
    assert mask.seq_lengths == expected.seq_lengths == (length, length)
    for kind in ("kv", "full_kv", "q", "full_q"):  # the last two for the backward pass
        counts, indices = f"{kind}_num_blocks", f"{kind}_indices"
        torch.testing.assert_close(getattr(mask, counts), getattr(expected, counts))
        torch.testing.assert_close(getattr(mask, indices), getattr(expected, indices))


def test_block_mask_of_a_group_skips_its_other_responses() -> None:
    blocks = 8 * [BLOCK_SIZE]  # a prompt of four blocks, four responses of one
    layout = SegmentLayout([(0, 4 * BLOCK_SIZE, -1)] + [(i * 128, 128, 0) for i in range(4, 8)])
    mask = layout_block_mask(layout, CPU)
    assert mask.seq_lengths[0] == sum(blocks)
    assert mask.kv_num_blocks.flatten().tolist() == 8 * [1]  # each its own triangle
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3, 4, 4, 4, 4]


def test_block_mask_is_made_once_and_goes_with_its_layout() -> None:
    layout = SegmentLayout(FORESTS["ragged group"])
    mask = layout_block_mask(layout, CPU)
    assert layout_block_mask(layout, CPU) is mask
    alive = weakref.ref(layout)
    del layout
    gc.collect()
    assert alive() is None


def test_padded_lengths_are_few() -> None:
    lengths = {padded_length(tokens) for tokens in range(1, 4097)}
    assert sorted(lengths) == [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(padded_length(tokens) >= tokens for tokens in range(1, 4097))
    assert padded_length(16_385) == 24_576


def assert_agrees_with_the_reference(layout: SegmentLayout, kv_heads: int) -> None:
    inputs = random_inputs(layout, kv_heads=kv_heads)
    got = output_and_gradients(flex_attention_backend(*inputs, layout, SCALE), inputs)
    expected = output_and_gradients(reference_attention(*inputs, layout, SCALE), inputs)
    for tensor, expected_tensor in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ALL_FORESTS)
def test_expansion_of_the_block_mask_agrees_with_the_reference(name: str, kv_heads: int) -> None:
    """The occupied blocks with the mask function inside them, forward and backward in float64."""
    assert_agrees_with_the_reference(SegmentLayout(ALL_FORESTS[name]), kv_heads)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["group", "two groups", "many"])
def test_flex_attention_itself_agrees_with_the_reference(
    name: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operator forward and backward, traced as for a GPU, its kernels by their formula.

    It refuses to train on a CPU, where it has no kernel for that; the formula is there."""
    monkeypatch.setattr(
        torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None
    )
    monkeypatch.setattr(flex_module, "expanded_attention", compiled_attention("aot_eager"))
    layout = SegmentLayout(LONG_FORESTS[name])
    assert_agrees_with_the_reference(layout, kv_heads)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("traced", [False, True])
def test_other_dtypes(
    traced: bool,
    kv_heads: int,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The expansion and PyTorch's operator against float64, relative to the largest entry where
    that is above 1."""
    if traced:
        validate = "_validate_device"
        monkeypatch.setattr(torch.nn.attention.flex_attention, validate, lambda *tensors: None)
        monkeypatch.setattr(flex_module, "expanded_attention", compiled_attention("aot_eager"))
    layout = SegmentLayout(LONG_FORESTS["two groups"])
    inputs = random_inputs(layout, kv_heads=kv_heads, dtype=dtype)
    output = flex_attention_backend(*inputs, layout, SCALE)
    assert output.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(reference_attention(*exact, layout, SCALE), exact)
    for tensor, right in zip(output_and_gradients(output, inputs), expected, strict=True):
        limit = tolerance * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(tensor, right, rtol=0, atol=limit)


@pytest.mark.slow
def test_the_cpu_kernel_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled forward pass, which goes through the occupied blocks alone."""
    monkeypatch.setattr(flex_module, "expanded_attention", compiled_attention())
    for name in ("group", "two groups"):
        layout = SegmentLayout(LONG_FORESTS[name])
        inputs = [x.detach() for x in random_inputs(layout, head_size=32, dtype=torch.float32)]
        output = flex_attention_backend(*inputs, layout, SCALE)
        expected = reference_attention(*inputs, layout, SCALE)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_compiled_once_for_each_padded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)  # 8 unless told otherwise
    compilations: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compilations.append(1)
        return lambda *inputs: (torch.empty(0),)  # nobody looks at the result

    attend = compiled_attention(backend=count)

    def compiled_for(tokens: int, num_responses: int) -> int:
        prompt = tokens - num_responses
        segments = [(0, prompt, -1)] + [(prompt + i, 1, 0) for i in range(num_responses)]
        mask = layout_block_mask(SegmentLayout(segments), CPU)
        shape = (1, 2, mask.seq_lengths[0], 16)
        attend(*torch.randn(3, *shape).unbind(0), mask, SCALE)
        return len(compilations)

    assert [compiled_for(tokens, 3) for tokens in (257, 384, 300)] == [1, 1, 1]
    assert [compiled_for(385, 3), compiled_for(512, 5), compiled_for(258, 4)] == [2, 2, 2]
    assert [compiled_for(600, 2), compiled_for(1000, 2)] == [3, 4]  # beyond that limit


def test_a_device_without_flex_attention_is_refused() -> None:
    layout = SegmentLayout(FORESTS["ragged group"])
    query, key, value = (torch.empty(1, 2, layout.num_tokens, 16, device="meta") for _ in range(3))
    with pytest.raises(ValueError, match="flex runs on cpu and cuda.* on meta.*choose merged"):
        flex_attention_backend(query, key, value, layout, SCALE)


def test_a_pytorch_without_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(function: object, *, fullgraph: bool, dynamic: bool, backend: object) -> object: ...

    monkeypatch.setattr(torch, "compile", older)
    with pytest.raises(ImportError, match="as in PyTorch 2.13 .*recompile_limit.*choose merged"):
        compiled_attention(backend="none")


def test_a_wrong_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the reference sees one block that is full where it should be partial."""
    layout = SegmentLayout(LONG_FORESTS["group"])
    right = layout_block_mask(layout, CPU)
    assert right.full_kv_num_blocks is not None and right.full_kv_indices is not None
    full_counts, counts = right.full_kv_num_blocks.clone(), right.kv_num_blocks.clone()
    full_counts[0, 0, 0], counts[0, 0, 0] = 1, 0  # the first triangle as a square
    wrong = BlockMask.from_kv_blocks(
        counts,
        right.kv_indices,
        full_counts,
        right.full_kv_indices,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=right.mask_mod,
        seq_lengths=right.seq_lengths,
    )
    monkeypatch.setattr(flex_module, "layout_block_mask", lambda layout, device: wrong)
    inputs = random_inputs(layout)
    output = flex_attention_backend(*inputs, layout, SCALE)
    assert (output - reference_attention(*inputs, layout, SCALE)).abs().max() > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("name", LONG_FORESTS)
def test_on_a_gpu_it_agrees_with_the_reference(
    name: str, dtype: torch.dtype, tolerance: float, kv_heads: int
) -> None:
    """Against float64 on the same GPU; the tolerance is relative to the largest entry."""
    layout = SegmentLayout(LONG_FORESTS[name])
    inputs = random_inputs(layout, kv_heads=kv_heads, head_size=64, dtype=dtype, device="cuda")
    got = output_and_gradients(flex_attention_backend(*inputs, layout, SCALE), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(reference_attention(*exact, layout, SCALE), exact)
    for tensor, expected_tensor in zip(got, expected, strict=True):
        limit = tolerance * float(expected_tensor.abs().max())
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=limit)


@pytest.mark.gpu
def test_on_a_gpu_wrong_dtypes_and_heads_are_refused() -> None:
    layout = SegmentLayout(FORESTS["ragged group"])
    for head_size, dtype in ((8, torch.bfloat16), (64, torch.float64)):
        inputs = random_inputs(layout, head_size=head_size, dtype=dtype, device="cuda")
        with pytest.raises(ValueError, match="heads of 16 or more.*choose merged"):
            flex_attention_backend(*inputs, layout, SCALE)
