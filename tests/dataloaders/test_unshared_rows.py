"""Rows in which nothing is shared: what is in them, and how many tokens a padded batch takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from easyrl.dataloaders.packing.groups import Packing
from easyrl.schema import MicroBatch, RolloutGroup
from tests.recipes import pack_groups
from tests.tiny_models import random_group


def groups(seed: int = 0, num: int = 7) -> list[RolloutGroup]:
    rng = np.random.default_rng(seed)
    return [
        random_group(rng, int(rng.integers(3, 20)), rng.integers(1, 40, 4).tolist(), index=index)
        for index in range(num)
    ]


def pack(packing: Packing, budget: int, **settings: bool) -> list[MicroBatch]:
    made = groups()
    return pack_groups(
        made,
        [np.arange(4.0) for _ in made],
        aggregation="token",
        max_tokens=64,
        mask_truncated=False,
        max_tokens_per_micro_batch=budget,
        packing=packing,
        **settings,
    )


def padded_tokens(row: MicroBatch) -> int:
    return len(row.segments) * max(segment.length for segment in row.segments)


@pytest.mark.parametrize("keep_order", [True, False])
@pytest.mark.parametrize("whole_groups", [True, False])
@pytest.mark.parametrize("packing", ["none", "padded"])
@pytest.mark.parametrize("budget", [50, 150, 400])
def test_each_sequence_is_whole_and_in_one_row(
    packing: Packing, budget: int, whole_groups: bool, keep_order: bool
) -> None:
    rows = pack(packing, budget, keep_order=keep_order, whole_groups=whole_groups)
    by_key = {
        (group.prompt.index, sample): np.concatenate([group.prompt.token_ids, c.token_ids])
        for group in groups()
        for sample, c in enumerate(group.completions)
    }
    seen = []
    for row in rows:
        assert all(segment.parent == -1 for segment in row.segments)
        keys = [(key[1], key[2]) for key in row.sequences]
        lengths = [segment.length for segment in row.segments]
        for key, tokens in zip(keys, row.input_ids.split(lengths), strict=True):
            np.testing.assert_array_equal(tokens.numpy(), by_key[key])
        expected = torch.cat([torch.arange(length) for length in lengths])
        assert torch.equal(row.position_ids, expected)
        assert torch.equal(row.input_ids[row.predictor_index + 1], row.label_ids)
        tokens_of_row = row.num_tokens if packing == "none" else padded_tokens(row)
        one = len({index for index, _ in keys}) == 1 if whole_groups else len(keys) == 1
        assert tokens_of_row <= budget or one
        seen += keys
    assert sorted(seen) == sorted(by_key)
    if whole_groups:
        rows_of = {index: [r for r, row in enumerate(rows) if index in
                           {key[1] for key in row.sequences}] for index in range(7)}  # fmt: skip
        assert all(len(found) == 1 for found in rows_of.values())
    if keep_order:
        first = [index for row in rows for index in sorted({k[1] for k in row.sequences})]
        assert first == sorted(first)


def test_similar_lengths_are_together_where_the_order_allows_it() -> None:
    """Fewest rows and less padding than in the order of the groups."""
    ordered, free = (pack("padded", 150, keep_order=keep) for keep in (True, False))
    assert sum(map(padded_tokens, free)) < sum(map(padded_tokens, ordered))
    assert len(free) <= len(ordered)
    ranges = sorted(
        (min(s.length for s in row.segments), max(s.length for s in row.segments)) for row in free
    )
    assert all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:], strict=False))
