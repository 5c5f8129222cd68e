"""Packed rows against a plain reading of what each token is, for any groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.dataloaders.packing import (
    Aggregation,
    batch_denominator,
    dummy_micro_batch,
    pack_groups,
)
from easyrl.schema import MicroBatch, RolloutGroup, Segment
from tests.tiny_models import random_group

MAX_TOKENS = 50


def pack(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray] | None = None,
    *,
    aggregation: Aggregation = "token",
    mask_truncated: bool = False,
    budget: int = 100,
) -> list[MicroBatch]:
    return pack_groups(
        groups,
        advantages or [np.arange(len(g.completions)) + 10.0 * g.prompt.index for g in groups],
        aggregation=aggregation,
        max_tokens=MAX_TOKENS,
        mask_truncated=mask_truncated,
        max_tokens_per_micro_batch=budget,
    )


def group_of(
    prompt_length: int, response_lengths: list[int], index: int = 0, masked: float = 0.0
) -> RolloutGroup:
    return random_group(
        np.random.default_rng(index), prompt_length, response_lengths, index=index, masked=masked
    )


def branch(row: MicroBatch, position: int) -> list[int]:
    """Row positions of the sequence that ends at ``position``, root first."""
    (index,) = (i for i, s in enumerate(row.segments) if s.start <= position < s.start + s.length)
    positions = list(range(row.segments[index].start, position + 1))
    while (index := row.segments[index].parent) != -1:
        start, length, _ = row.segments[index]
        positions = [*range(start, start + length), *positions]
    return positions


def trained_tokens(rows: Sequence[MicroBatch]) -> list[tuple[object, ...]]:
    """For each of the N tokens: all token ids before it on its branch, itself, and its numbers.

    The token's own place in the row is found from its predictor: the first token of a response
    follows the prompt's end in the tree and not in the row.
    """
    tokens = []
    for row in rows:
        ids, positions = row.input_ids.tolist(), row.position_ids.tolist()
        for n in range(row.num_loss_tokens):
            before = branch(row, int(row.predictor_index[n]))
            assert [positions[p] for p in before] == list(range(len(before)))
            context = tuple(ids[p] for p in before)
            numbers = (row.advantages[n].item(), row.inference_logprobs[n].item())
            tokens.append((context, int(row.label_ids[n]), *numbers, row.loss_weights[n].item()))
    return tokens


def expected_tokens(
    groups: Sequence[RolloutGroup], aggregation: Aggregation, mask_truncated: bool
) -> list[tuple[object, ...]]:
    tokens = []
    for group in groups:
        for g, completion in enumerate(group.completions):
            if mask_truncated and completion.finish_reason == "length":
                continue
            ids = [*group.prompt.token_ids.tolist(), *completion.token_ids.tolist()]
            count = int(completion.loss_mask.sum())
            for r in range(len(completion.token_ids)):
                if completion.loss_mask[r]:
                    weight = {"token": 1, "sequence": 1 / count, "constant": 1 / MAX_TOKENS}
                    at = len(group.prompt.token_ids) + r
                    tokens.append(
                        (
                            tuple(ids[:at]),
                            ids[at],
                            g + 10.0 * group.prompt.index,
                            float(completion.logprobs[r]),
                            float(np.float32(weight[aggregation])),
                        )
                    )
    return tokens


groups_strategy = st.lists(
    st.builds(
        lambda seed, prompt, responses, masked, truncated: (
            seed,
            prompt,
            responses,
            masked,
            truncated,
        ),
        st.integers(0, 1000),
        st.integers(1, 9),
        st.lists(st.integers(0, 12), min_size=1, max_size=4),
        st.sampled_from([0.0, 0.5]),
        st.sets(st.integers(0, 3)),
    ),
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(
    shapes=groups_strategy,
    aggregation=st.sampled_from(["sequence", "token", "constant"]),
    mask_truncated=st.booleans(),
    budget=st.integers(1, 60),
)
def test_every_trained_token_once_behind_its_own_past(
    shapes: list[tuple[int, int, list[int], float, set[int]]],
    aggregation: Aggregation,
    mask_truncated: bool,
    budget: int,
) -> None:
    groups = [
        random_group(
            np.random.default_rng(seed),
            prompt,
            responses,
            index=index,
            masked=masked,
            truncated=tuple(truncated),
        )
        for index, (seed, prompt, responses, masked, truncated) in enumerate(shapes)
    ]
    rows = pack(groups, aggregation=aggregation, mask_truncated=mask_truncated, budget=budget)
    assert trained_tokens(rows) == expected_tokens(groups, aggregation, mask_truncated)
    for row in rows:
        ends = [segment.start + segment.length for segment in row.segments]
        assert [segment.start for segment in row.segments] == [0, *ends[:-1]]
        assert ends[-1] == row.num_tokens
        # Over the budget only where a prompt with one response is too long by itself.
        assert row.num_tokens <= budget or len(row.segments) == 2
        assert row.sequence_index.unique().tolist() == list(range(row.num_sequences))
        assert row.num_sequences == sum(segment.parent != -1 for segment in row.segments)


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


def test_long_group_is_split_by_responses_with_its_prompt_repeated() -> None:
    group = group_of(4, [3, 5, 2, 6])
    rows = pack([group], budget=12)
    assert [[s.length for s in row.segments] for row in rows] == [[4, 3, 5], [4, 2, 6]]
    for row in rows:
        assert row.input_ids[:4].tolist() == group.prompt.token_ids.tolist()


def test_too_long_a_response_gets_its_own_row() -> None:
    rows = pack([group_of(4, [3, 50, 2], 0), group_of(4, [2], 1)], budget=20)
    assert [[s.length for s in row.segments] for row in rows] == [[4, 3], [4, 50], [4, 2, 4, 2]]
    prompt_over_budget = pack([group_of(30, [1, 1])], budget=20)
    assert [[s.length for s in row.segments] for row in prompt_over_budget] == [[30, 1], [30, 1]]


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
    assert row.segments == (Segment(0, 3, -1), Segment(3, 4, 0))
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
