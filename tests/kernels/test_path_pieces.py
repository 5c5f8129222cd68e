"""Keys that are gathered for a few segments at a time: the same numbers, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from easyrl.kernels.attention import path_gather
from easyrl.kernels.attention.segment_layout import Paths, SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import reference_attention
from easyrl.kernels.attention.varlen_attention import torch_kernel, varlen_attention_backend
from tests.kernels import path_operator
from tests.kernels.flash_stand_in import (
    SCALE,
    causal_by_sequence,
    flash_attention_on_cpu,  # noqa: F401, a fixture
)
from tests.kernels.forests import ALL_FORESTS, output_and_gradients, random_inputs
from tests.kernels.memory_recorder import LargestTensor, PeakMemory

CPU = torch.device("cpu")
BYTES_PER_KEY = 2 * 2 * 8 * 8  # with its value, 2 heads of 8 in float64
# 3,200 keys on the paths of a row of 140 tokens
WIDE = SegmentLayout([(0, 60, -1), *((60 + 2 * i, 2, 0) for i in range(40))])


@pytest.fixture
def gathered_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many keys are gathered at a time."""
    return lambda most: monkeypatch.setattr(path_gather, "GATHERED_BYTES", most * BYTES_PER_KEY)


def attend(inputs: list[Tensor], layout: SegmentLayout) -> Tensor:
    return varlen_attention_backend(*inputs, layout, SCALE, kernel=torch_kernel)


@pytest.mark.parametrize("most", [1, 20, 60])
@pytest.mark.parametrize("name", ALL_FORESTS)
@pytest.mark.usefixtures("flash_attention_on_cpu")
def test_agrees_with_the_reference(
    name: str, most: int, gathered_keys: Callable[[int], None]
) -> None:
    """Forward and backward, float64."""
    layout = SegmentLayout(ALL_FORESTS[name])
    gathered_keys(most)
    inputs = random_inputs(layout)
    got = output_and_gradients(attend(inputs, layout), inputs)
    expected = output_and_gradients(reference_attention(*inputs, layout, SCALE), inputs)
    for tensor, right in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL_FORESTS)
def test_pieces_are_the_row(name: str) -> None:
    layout = SegmentLayout(ALL_FORESTS[name])
    (whole,) = layout.paths(CPU)
    for most_keys, most_segments in ((20, None), (None, 3), (1, None), (30, 2)):
        pieces = layout.paths(CPU, most_keys, most_segments)
        assert torch.equal(torch.cat([p.key_index for p in pieces]), whole.key_index)
        assert sum(p.query_ends[-1] for p in pieces) == layout.num_tokens
        for piece in pieces:
            assert piece.key_ends[-1] == len(piece.key_index) == int(piece.key_starts[-1])
            alone = len(piece.query_ends) == 1
            assert most_keys is None or len(piece.key_index) <= most_keys or alone
            assert most_segments is None or len(piece.query_ends) <= most_segments
        for one, next_one in zip(pieces, pieces[1:], strict=False):  # as few as may be
            more = len(one.key_index) + next_one.key_ends[0]
            full = most_keys is not None and more > most_keys
            assert full or len(one.query_ends) == most_segments


def peak(layout: SegmentLayout, work: Callable[[list[Tensor]], object]) -> tuple[int, int]:
    """Most elements that ``work`` holds at a time, and those of its largest tensor."""
    inputs = random_inputs(layout)
    held = [p.key_index for p in layout.paths(CPU, path_gather.most_keys(inputs[1]))]
    with PeakMemory(*inputs, *held) as memory, LargestTensor() as largest:
        work(inputs)
    return memory.peak, largest.numel


def forward(inputs: list[Tensor]) -> object:
    with torch.no_grad():
        return attend(inputs, WIDE)


def forward_and_backward(inputs: list[Tensor]) -> object:
    return output_and_gradients(attend(inputs, WIDE), inputs)


@pytest.mark.parametrize("work", [forward, forward_and_backward])
@pytest.mark.usefixtures("flash_attention_on_cpu")
def test_memory_is_that_of_a_piece(
    work: Callable[[list[Tensor]], object], gathered_keys: Callable[[int], None]
) -> None:
    """Ten tensors of the row, and per key its value, both gradients and what the stand-in makes."""
    gathered_keys(10**6)
    at_once, _ = peak(WIDE, work)
    gathered_keys(200)
    in_pieces, largest = peak(WIDE, work)
    tokens, keys = WIDE.num_tokens * 4 * 8, 200 * 2 * 8
    assert largest <= max(tokens, keys)
    assert in_pieces <= 10 * tokens + 5 * keys
    assert at_once > 2 * in_pieces  # else this says nothing


@pytest.mark.usefixtures("flash_attention_on_cpu")
def test_a_piece_keeps_no_output_of_its_own(gathered_keys: Callable[[int], None]) -> None:
    gathered_keys(200)
    inputs = random_inputs(WIDE)
    held = [p.key_index for p in WIDE.paths(CPU, 200)]
    with PeakMemory(*inputs, *held) as memory:
        output = attend(inputs, WIDE)
        alive = memory.alive
    lengths = 2 * (len(WIDE.segments) + len(WIDE.paths(CPU, 200)))
    # The output, its log-sum-exp and random state per piece, and the lengths of the paths
    assert alive <= output.numel() + WIDE.num_tokens * 4 + lengths + 2 * len(held)


def test_a_budget_is_of_bytes() -> None:
    key = torch.empty(1, 8, 5, 128, dtype=torch.bfloat16)
    assert path_gather.most_keys(key) == 2**28 // (2 * 8 * 128 * 2) == 65_536
    assert path_gather.most_keys(key.float()) == 32_768


def test_stand_in_of_sequences_sees_each_piece(gathered_keys: Callable[[int], None]) -> None:
    """Lengths start at 0 and end with the piece's; the stand-in holds them to it."""
    gathered_keys(200)
    inputs = random_inputs(WIDE)
    output = varlen_attention_backend(*inputs, WIDE, SCALE, kernel=causal_by_sequence)
    expected = reference_attention(*inputs, WIDE, SCALE)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


# ---- activation checkpointing --------------------------------------------------------------------

SPLIT = 15  # of the queries
INDEX_PARTS = (path_operator.INDEX[:200], path_operator.INDEX[200:])


def piece(index: Tensor, queries: int) -> Paths:
    starts = (torch.tensor([0, queries]), torch.tensor([0, len(index)]))
    return Paths(index, (queries,), (len(index),), *starts, queries, len(index))


PIECES = [
    piece(INDEX_PARTS[0], SPLIT),
    piece(INDEX_PARTS[1], path_operator.TOKENS - SPLIT),
]


def in_pieces(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return path_gather.attend_over_paths(
        lambda q, k, v, paths: path_operator.fused(q, k, v),
        *(query.sin(), key.sin(), value.sin()),
        PIECES,
    )


def selectively(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = partial(create_selective_checkpoint_contexts, path_operator.keep_attention)
    return checkpoint(
        *(in_pieces, query, key, value),
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=context,
    )


def by_indexing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    outputs = []
    for rows, index in zip(query.sin().tensor_split([SPLIT]), INDEX_PARTS, strict=True):
        scores = torch.einsum("qhd,khd->hqk", rows, key.sin()[index])
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(2), value.sin()[index]))
    return torch.cat(outputs)


@pytest.mark.parametrize("form", [in_pieces, selectively])
def test_attention_of_no_piece_is_computed_again(form: Callable[..., Tensor]) -> None:
    tensors = path_operator.inputs()
    expected = path_operator.results(by_indexing, tensors)
    with path_operator.Calls() as calls:
        got = path_operator.results(form, tensors)
    assert calls.number == len(PIECES)
    for tensor, right in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, right, rtol=0, atol=1e-12)


def test_gradients_are_taken_twice_where_the_graph_is_retained() -> None:
    tensors = path_operator.inputs()
    output = in_pieces(*tensors).sum()
    first = torch.autograd.grad(output, tensors, retain_graph=True)
    for got, expected in zip(torch.autograd.grad(output, tensors), first, strict=True):
        assert torch.equal(got, expected)
