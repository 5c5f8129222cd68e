"""Packed rows: layout, splits, masks, weights. For any groups: ``test_packing_properties.py``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.schema import MicroBatch, RolloutGroup, SampleKey, Segment
from tests.dataloaders.packed_rows import MAX_TOKENS, PACKINGS, pack, trained_tokens
from tests.recipes import batch_denominator
from tests.tiny_models import random_group


def group_of(
    prompt_length: int, response_lengths: list[int], index: int = 0, masked: float = 0.0
) -> RolloutGroup:
    return random_group(
        np.random.default_rng(index), prompt_length, response_lengths, index=index, masked=masked
    )


def test_layout_of_one_group() -> None:
    group = group_of(3, [2, 4])
    (row,) = pack([group])
    first, second = group.completions
    assert row.segments == (Segment(0, 3, -1), Segment(3, 2, 0), Segment(5, 4, 0))
    assert row.input_ids.tolist() == [*group.prompt.token_ids, *first.token_ids, *second.token_ids]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert row.predictor_index.tolist() == [2, 3, 2, 5, 6, 7]  # position 2 predicts both firsts
    assert row.label_ids.tolist() == [*first.token_ids, *second.token_ids]
    assert row.sequence_index.tolist() == [0, 0, 1, 1, 1, 1]
    assert row.advantages.tolist() == [0, 0, 1, 1, 1, 1]
    assert (row.num_sequences, row.num_tokens, row.num_loss_tokens) == (2, 9, 6)
    assert not row.is_dummy


def test_dtypes() -> None:
    for row in (*pack([group_of(3, [2, 4])]), dummy_micro_batch()):
        for name in ("input_ids", "position_ids", "predictor_index", "label_ids", "sequence_index"):
            assert getattr(row, name).dtype == torch.int64, name
        for name in ("advantages", "inference_logprobs", "loss_weights"):
            assert getattr(row, name).dtype == torch.float32, name


def test_groups_share_rows_in_order_up_to_the_budget() -> None:
    groups = [group_of(2, [3, 3], i) for i in range(5)]  # 8 tokens each
    assert [row.num_tokens for row in pack(groups, budget=16)] == [16, 16, 8]
    assert [row.num_tokens for row in pack(groups, budget=15)] == [8] * 5


def samples_of(rows: list[MicroBatch]) -> list[list[tuple[int, int]]]:
    """Prompt and sample of each row's sequences."""
    return [[(key.prompt, key.sample) for key in row.sequences] for row in rows]


def test_long_group_is_split_by_responses_with_its_prompt_repeated() -> None:
    """As few parts as possible, of even cost, however the responses are ordered."""
    group = group_of(4, [3, 5, 2, 6])
    rows = pack([group], budget=12)
    assert samples_of(rows) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert [row.num_tokens for row in rows] == [12, 12]
    for row in rows:
        assert row.input_ids[:4].tolist() == group.prompt.token_ids.tolist()
    even = pack([group_of(4, [9, 1, 1, 9, 1, 1])], budget=20)  # filled in order: 4+12, 4+10
    assert samples_of(even) == [[(0, 0), (0, 1), (0, 4)], [(0, 2), (0, 3), (0, 5)]]
    uneven = pack([group_of(4, [2, 6, 2, 6])], budget=12)  # filled in order: three rows
    assert [row.num_tokens for row in uneven] == [12, 12]


def test_rows_of_even_cost_from_groups_in_any_order() -> None:
    sizes = [8, 8, 4, 4]
    groups = [group_of(2, [size - 2], i) for i, size in enumerate(sizes)]
    in_order = pack(groups, budget=14)
    assert samples_of(in_order) == [[(0, 0)], [(1, 0), (2, 0)], [(3, 0)]]
    any_order = pack(groups, budget=14, keep_order=False)
    assert samples_of(any_order) == [[(0, 0), (2, 0)], [(1, 0), (3, 0)]]
    assert samples_of(pack(groups, budget=1000, keep_order=False)) == [[(i, 0) for i in range(4)]]


@pytest.mark.parametrize("whole_groups", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_for_threads_are_even_and_say_the_same(packing: str, whole_groups: bool) -> None:
    """Three threads; what fits into one row is shared out by groups where it is enough."""
    groups = [group_of(20, [50] * 4, i) for i in range(6)]  # 220 tokens each
    how: dict[str, Any] = dict(budget=10_000, packing=packing, whole_groups=whole_groups)
    rows = pack(groups, keep_order=False, min_rows=3, **how)
    assert [len({key.prompt for key in row.sequences}) for row in rows] == [2] * 3
    (one,) = pack(groups, keep_order=False, **how)
    assert Counter(trained_tokens(rows)) == Counter(trained_tokens([one]))
    two = pack(groups[:3], keep_order=False, min_rows=3, **how)
    assert [len({key.prompt for key in row.sequences}) for row in two] == [2, 1]  # 660 tokens
    assert len(pack(groups[:2], keep_order=False, min_rows=3, **how)) == 1
    assert len(pack(groups[:1], keep_order=False, min_rows=3, **how)) == 1  # stays together
    assert len(pack(groups, keep_order=True, min_rows=3, **how)) == 1


def test_more_rows_than_threads_are_packed_as_without_threads() -> None:
    groups = [group_of(2, [7] * 4, i) for i in range(60)]
    for packing in PACKINGS:
        how: dict[str, Any] = dict(budget=56, packing=packing, keep_order=False)
        few, same = pack(groups, **how), pack(groups, min_rows=2, **how)
        assert samples_of(few) == samples_of(same)


def test_groups_fill_rows_in_parts_where_that_is_worth_the_repeated_prompts() -> None:
    """Groups of more than half a row, whole in a row each, or six in four rows."""
    short_prompt = [group_of(2, [7] * 4, i) for i in range(6)]
    filled = pack(short_prompt, budget=56, keep_order=False)
    samples = [sample for row in samples_of(filled) for sample in row]
    assert len(filled) == 4 and max(row.num_tokens for row in filled) <= 56
    assert sorted(samples) == [(i, sample) for i in range(6) for sample in range(4)]
    long_prompt = [group_of(22, [2] * 4, i) for i in range(6)]
    for packing in PACKINGS:  # else five rows, with four prompts more
        assert len(pack(long_prompt, budget=56, packing=packing, keep_order=False)) == 6
    in_order = pack(short_prompt, budget=56)
    assert [row.num_tokens for row in in_order] == [30] * 6


def test_too_long_a_response_gets_its_own_row() -> None:
    groups = [group_of(4, [3, 50, 2], 0), group_of(4, [2], 1)]
    in_order = pack(groups, budget=20)
    assert samples_of(in_order) == [[(0, 0), (0, 2)], [(0, 1)], [(1, 0)]]
    any_order = pack(groups, budget=20, keep_order=False)
    assert samples_of(any_order) == [[(0, 0), (0, 2), (1, 0)], [(0, 1)]]
    assert [row.num_tokens for row in any_order] == [15, 54]
    prompt_over_budget = pack([group_of(30, [1, 1])], budget=20)
    assert samples_of(prompt_over_budget) == [[(0, 0)], [(0, 1)]]


def test_prompt_of_a_single_response_is_one_segment_with_it() -> None:
    """Segments are chains without branches: one causal call each."""
    (row,) = pack([group_of(3, [4])])
    assert row.segments == (Segment(0, 7, -1),)
    assert row.predictor_index.tolist() == [2, 3, 4, 5]


def test_masked_tokens_stay_as_context() -> None:
    """A tool's tokens in the middle of a response are seen but neither predicted nor counted."""
    group = group_of(2, [5])
    group.completions[0].loss_mask[:] = [True, False, False, True, True]
    (row,) = pack([group], aggregation="sequence")
    assert row.num_tokens == 7
    assert row.predictor_index.tolist() == [1, 4, 5]
    assert row.label_ids.tolist() == group.completions[0].token_ids[[0, 3, 4]].tolist()
    assert row.loss_weights.tolist() == pytest.approx([1 / 3] * 3)


def test_sequences_without_a_trained_token_are_left_out_but_counted() -> None:
    rng = np.random.default_rng(0)
    group = random_group(rng, 3, [4, 0, 6], truncated=(2,))
    (row,) = pack([group], mask_truncated=True)
    assert row.num_tokens == 7 and row.sequences == (SampleKey(0, 0, 0),)
    for aggregation, denominator in (("sequence", 3), ("token", 4), ("constant", 3)):
        assert batch_denominator([group], aggregation, mask_truncated=True) == denominator
    assert batch_denominator([group], "token", mask_truncated=False) == 10
    nothing = random_group(rng, 3, [0, 5], truncated=(1,))
    assert pack([nothing], mask_truncated=True) == []
    assert pack([]) == []


@pytest.mark.parametrize("budget", [12, 1000])
def test_weights_and_denominator_are_the_published_losses(budget: int) -> None:
    """Padded [B, R] formulas of TRL's ``grpo``, ``dapo`` and ``dr_grpo``, written out."""
    rng = np.random.default_rng(2)
    groups = [
        random_group(rng, 5, [3, 0, 7], index=0, truncated=(2,), masked=0.2),
        random_group(rng, 4, [6, 2], index=1, masked=0.2),
    ]
    completions = [c for g in groups for c in g.completions]
    mask, loss = np.zeros((2, len(completions), 8))
    for b, completion in enumerate(completions):
        used = completion.loss_mask & (completion.finish_reason != "length")
        mask[b, : len(used)] = used
        loss[b, : len(used)] = completion.logprobs  # any number that belongs to the token
    published = {
        "sequence": ((loss * mask).sum(1) / mask.sum(1).clip(min=1)).mean(),
        "token": (loss * mask).sum() / mask.sum(),
        "constant": (loss * mask).sum() / (len(completions) * MAX_TOKENS),
    }
    for aggregation in ("sequence", "token", "constant"):
        rows = pack(groups, aggregation=aggregation, mask_truncated=True, budget=budget)
        total = sum(float((r.loss_weights * r.inference_logprobs).sum()) for r in rows)
        ours = total / batch_denominator(groups, aggregation, mask_truncated=True)
        assert ours == pytest.approx(published[aggregation], rel=1e-5)  # fp32 weights


def test_dummy_row() -> None:
    row = dummy_micro_batch()
    assert row.is_dummy and row.num_loss_tokens == 1 and row.num_sequences == 1
    assert row.loss_weights.tolist() == [0.0]
    assert sum(segment.length for segment in row.segments) == row.num_tokens
