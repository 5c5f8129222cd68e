"""The padded form against a dense float64 computation, and the rows that it is taken for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.kernels.attention.padded_attention import padded_attention, suits
from easyrl.kernels.attention.segment_layout import SegmentLayout
from tests.kernels.forests import ALL_FORESTS, random_forest, random_inputs
from tests.kernels.test_merged_attention import SCALE, TOLERANCES, assert_is_dense


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("forest", ALL_FORESTS)
def test_is_the_definition(forest: str, kv_heads: int, dtype: torch.dtype) -> None:
    layout = SegmentLayout(ALL_FORESTS[forest])
    assert_is_dense(
        layout, random_inputs(layout, kv_heads=kv_heads, dtype=dtype), SCALE, padded_attention
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    num_segments=st.integers(1, 40),
    longest=st.integers(1, 30),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_random_forests(seed: int, num_segments: int, longest: int, kv_heads: int) -> None:
    layout = SegmentLayout(random_forest(seed, num_segments, longest))
    assert_is_dense(layout, random_inputs(layout, kv_heads=kv_heads), SCALE, padded_attention)


def test_the_result_is_what_projections_want() -> None:
    layout = SegmentLayout(ALL_FORESTS["two groups"])
    output = padded_attention(*random_inputs(layout), layout, SCALE)
    assert output.transpose(1, 2).is_contiguous()


def test_keys_of_padding_and_of_others_weigh_nothing() -> None:
    """Not even where they are infinite."""
    layout = SegmentLayout([(0, 3, -1), (3, 1, 0), (4, 5, 0)])
    query, key, value = random_inputs(layout)
    expected = padded_attention(query, key, value, layout, SCALE)
    far = value.detach().clone()
    far[:, :, 4:] = 1e300
    got = padded_attention(query, key, far, layout, SCALE)
    torch.testing.assert_close(got[:, :, :4], expected[:, :, :4], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([(0, 10, -1), *((10 + 20 * i, 20, 0) for i in range(30))], True),
        ([(0, 80, -1), *((80 + 20 * i, 20, 0) for i in range(30))], False),  # paths of 100
        ([(0, 1, -1), *((1 + i, 1, 0) for i in range(30)), (31, 60, -1)], False),  # all padding
        ([(0, 300, -1)], False),
    ],
)
def test_rows_of_many_short_segments_suit(
    segments: list[tuple[int, int, int]], expected: bool
) -> None:
    assert suits(SegmentLayout(segments)) == expected
