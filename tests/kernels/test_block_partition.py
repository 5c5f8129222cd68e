"""Blocks of a row: every visible pair once, and batches whose stretches do not overlap."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from easyrl.kernels.attention.block_partition import Block, Span, partition
from easyrl.kernels.attention.merged_attention import merged_attention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import reference_attention
from tests.kernels.forests import Triples, output_and_gradients, random_forest, random_inputs

# Responses nested in others: parts of their rectangles are of one shape and offset.
NESTED: Triples = [(0, 3, -1), (3, 3, 0), (6, 512, 1), (518, 510, 0)]
NUM_ROWS = 2000


def seen_by_definition(segments: Triples) -> list[int]:
    """For each token the positions that it sees, as bits."""
    of_paths: list[int] = []
    rows: list[int] = []
    for start, length, parent in segments:
        above = of_paths[parent] if parent >= 0 else 0
        rows += [above | (((1 << (i + 1)) - 1) << start) for i in range(length)]
        of_paths.append(above | (((1 << length) - 1) << start))
    return rows


def seen_by_queries(segments: Triples, first_queries: Sequence[int]) -> list[int]:
    """The same, and nothing for tokens that are keys alone."""
    rows = seen_by_definition(segments)
    for (start, _, _), first in zip(segments, first_queries, strict=True):
        rows[start : start + first] = [0] * first
    return rows


def seen_by_blocks(blocks: Sequence[Block], num_tokens: int) -> list[int]:
    rows = [0] * num_tokens
    for queries, keys, causal in blocks:
        for i in range(queries.number):
            first_key = keys.start + i * keys.step
            for j in range(queries.length):
                bits = ((1 << (j + 1 if causal else keys.length)) - 1) << first_key
                row = queries.start + i * queries.step + j
                assert not rows[row] & bits, "a pair is held twice"
                rows[row] |= bits
    return rows


def random_nest(draw: random.Random, most_queries: int) -> Triples:
    """A prompt and a continuation of one length; what sees them is about as long as the limit, and
    half as long: that half may look like what the limit cuts off."""
    short, half = draw.randint(1, 4), most_queries // 2
    rest = max(1, most_queries + draw.randint(0, 2) - short - half)
    ends = (short, 2 * short, 2 * short + half)
    return [(0, short, -1), (ends[0], short, 0), (ends[1], half, 1), (ends[2], rest, 0)]


def overlaps(span: Span) -> bool:
    return span.number > 1 and span.step < span.length


def test_random_rows_and_limits() -> None:
    batches = 0
    for seed in range(NUM_ROWS):
        draw = random.Random(seed)
        longest = draw.choice([None, 1, 2, 4, 8])
        most_queries = draw.choice([None, 1, 2, 3, 5, 8, 16])
        if seed % 4:
            segments = random_forest(seed, draw.choice([3, 8, 15]), draw.choice([1, 2, 3, 8]))
        else:
            most_queries = draw.choice([8, 12, 16, 20])
            segments = random_nest(draw, most_queries)
        layout = SegmentLayout(segments)
        blocks = partition(layout, longest, most_queries)
        for queries, keys, _ in blocks:
            case = (segments, longest, most_queries, queries, keys)
            assert not overlaps(queries) and not overlaps(keys), case
            batches += queries.number > 1
        assert seen_by_blocks(blocks, layout.num_tokens) == seen_by_definition(segments)
        firsts = [draw.choice([0, 0, draw.randint(0, length)]) for _, length, _ in segments]
        blocks = partition(SegmentLayout(segments, firsts), longest, most_queries)
        assert seen_by_blocks(blocks, layout.num_tokens) == seen_by_queries(segments, firsts)
    assert batches > NUM_ROWS  # it is batches that this is about


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equal_parts_of_nested_rectangles(kv_heads: int) -> None:
    """With the limits that a CPU has: sums are formed in place over each batch."""
    layout = SegmentLayout(NESTED)
    inputs = random_inputs(layout, kv_heads=kv_heads)
    got = output_and_gradients(merged_attention(*inputs, layout, 0.3), inputs)
    expected = output_and_gradients(reference_attention(*inputs, layout, 0.3), inputs)
    for first, second in zip(got, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
