"""Packing of any groups: lengths, group sizes, masks, truncations, budgets, splits, orders.

What only trees do is in ``test_packing_tree.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.recipes.estimators import Aggregation
from easyrl.schema import RolloutGroup
from tests.dataloaders.packed_rows import (
    BUSY,
    PACKINGS,
    expected_tokens,
    pack,
    random_groups,
    trained_tokens,
)
from tests.recipes import batch_denominator

PACKING = st.sampled_from(PACKINGS)
AGGREGATIONS = st.sampled_from(["sequence", "token", "constant"])


@settings(BUSY, max_examples=150)
@given(random_groups(), AGGREGATIONS, st.booleans(), st.integers(1, 60), PACKING, st.booleans())
def test_every_trained_token_once_behind_its_own_past(
    groups: list[RolloutGroup],
    aggregation: Aggregation,
    mask_truncated: bool,
    budget: int,
    packing: Literal["prompt", "tree"],
    keep_order: bool,
) -> None:
    """With its predictor, position, weight, advantage and log-probability; nothing else is in."""
    rows = pack(
        groups,
        aggregation=aggregation,
        mask_truncated=mask_truncated,
        budget=budget,
        packing=packing,
        keep_order=keep_order,
    )
    expected = expected_tokens(groups, aggregation, mask_truncated)
    assert Counter(trained_tokens(rows)) == Counter(expected)
    for row in rows:
        layout = SegmentLayout(row.segments)  # depth first
        assert layout.num_tokens == row.num_tokens
        assert row.sequences == tuple(sorted(row.sequences))
        assert row.sequence_index.tolist() == sorted(row.sequence_index.tolist())
        assert row.sequence_index.unique().tolist() == list(range(row.num_sequences))


@settings(BUSY, max_examples=100)
@given(random_groups(max_groups=6), st.integers(1, 60), PACKING, st.booleans())
def test_budget_is_kept(
    groups: list[RolloutGroup],
    budget: int,
    packing: Literal["prompt", "tree"],
    keep_order: bool,
) -> None:
    """Over it only where a prompt with one response is too long by itself."""
    for row in pack(groups, budget=budget, packing=packing, keep_order=keep_order):
        assert row.num_tokens <= budget or row.num_sequences == 1


@settings(BUSY, max_examples=100)
@given(random_groups(max_groups=6), st.integers(1, 60), PACKING, st.booleans())
def test_whole_groups_are_not_split(
    groups: list[RolloutGroup],
    budget: int,
    packing: Literal["prompt", "tree"],
    keep_order: bool,
) -> None:
    """For a loss that couples a group's tokens; one that exceeds the budget has its own row."""
    rows = pack(groups, budget=budget, packing=packing, keep_order=keep_order, whole_groups=True)
    tokens = trained_tokens(rows)
    assert Counter(tokens) == Counter(expected_tokens(groups, "token", False))
    members = [{key.prompt for key in row.sequences} for row in rows]
    assert sum(map(len, members)) == len(set().union(*members))  # each in one row
    for row, prompts in zip(rows, members, strict=True):
        assert row.num_tokens <= budget or len(prompts) == 1


@settings(BUSY, max_examples=100)
@given(random_groups(max_groups=6), st.integers(1, 60))
def test_rows_that_keep_the_order_are_closed_only_when_full(
    groups: list[RolloutGroup], budget: int
) -> None:
    rows = pack(groups, budget=budget)
    indices = [index for row in rows for index in dict.fromkeys(k.prompt for k in row.sequences)]
    assert indices == sorted(indices)
    for row, following in zip(rows, rows[1:], strict=False):
        roots = [i for i, segment in enumerate(following.segments) if segment.parent == -1]
        end = (*roots, len(following.segments))[1]
        assert row.num_tokens + sum(s.length for s in following.segments[:end]) > budget


@settings(BUSY, max_examples=100)
@given(st.data(), random_groups(max_groups=6), AGGREGATIONS, st.booleans())
def test_cutting_a_batch_anywhere_keeps_its_sums(
    data: st.DataObject, groups: list[RolloutGroup], aggregation: Aggregation, mask_truncated: bool
) -> None:
    """Any order of arrival, any calls, any budgets: the same tokens with the same weights.

    And so the same loss, whatever a token's loss is; the denominators of the parts add up.
    """
    order = data.draw(st.permutations(groups))
    packing, keep_order = data.draw(PACKING), data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(groups))))))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    tokens: Counter[tuple[object, ...]] = Counter()
    for part in parts:
        budget = data.draw(st.integers(1, 80))
        rows = pack(
            part,
            aggregation=aggregation,
            mask_truncated=mask_truncated,
            budget=budget,
            packing=packing,
            keep_order=keep_order,
        )
        tokens += Counter(trained_tokens(rows))
    assert tokens == Counter(expected_tokens(groups, aggregation, mask_truncated))
    denominators = [batch_denominator(part, aggregation, mask_truncated) for part in parts]
    assert sum(denominators) == batch_denominator(groups, aggregation, mask_truncated)


@settings(BUSY, max_examples=50)
@given(random_groups(), st.integers(1, 60), PACKING)
def test_packing_changes_no_group(
    groups: list[RolloutGroup], budget: int, packing: Literal["prompt", "tree"]
) -> None:
    """The journal's record of a group is what was trained, also after it was packed."""

    def arrays() -> list[np.ndarray]:
        completions = [c for group in groups for c in group.completions]
        return [
            *(group.prompt.token_ids for group in groups),
            *(a for c in completions for a in (c.token_ids, c.logprobs, c.loss_mask)),
        ]

    before = [array.copy() for array in arrays()]
    for row in pack(groups, budget=budget, packing=packing):
        row.input_ids.zero_()
        row.inference_logprobs.zero_()
    assert all(np.array_equal(a, b) for a, b in zip(before, arrays(), strict=True))
