"""What packed rows say, token by token, and what a plain reading of their groups says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from easyrl.recipes.estimators import Aggregation
from easyrl.schema import MicroBatch, RolloutGroup, SampleKey
from tests.recipes import pack_groups
from tests.tiny_models import random_group

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a shared machine
MAX_TOKENS = 50
PACKINGS: tuple[Literal["prompt", "tree"], ...] = ("prompt", "tree")


def pack(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray] | None = None,
    *,
    aggregation: Aggregation = "token",
    mask_truncated: bool = False,
    budget: int = 100,
    packing: Literal["prompt", "tree"] = "prompt",
    keep_order: bool = True,
    whole_groups: bool = False,
    min_rows: int = 1,
) -> list[MicroBatch]:
    return pack_groups(
        groups,
        advantages or [np.arange(len(g.completions)) + 10.0 * g.prompt.index for g in groups],
        aggregation=aggregation,
        max_tokens=MAX_TOKENS,
        mask_truncated=mask_truncated,
        max_tokens_per_micro_batch=budget,
        packing=packing,
        keep_order=keep_order,
        whole_groups=whole_groups,
        min_rows=min_rows,
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
    """For each of the N tokens: its sequence, all token ids before it on its branch, itself, and
    its numbers.

    The token's own place in the row is found from its predictor: the first token of a response
    follows the prompt's end in the tree and not in the row.
    """
    tokens = []
    for row in rows:
        ids, positions = row.input_ids.tolist(), row.position_ids.tolist()
        for n in range(row.num_loss_tokens):
            before = branch(row, int(row.predictor_index[n]))
            assert [positions[p] for p in before] == list(range(len(before)))
            key = row.sequences[int(row.sequence_index[n])]
            context = tuple(ids[p] for p in before)
            numbers = (row.advantages[n].item(), row.inference_logprobs[n].item())
            tokens.append(
                (key, context, int(row.label_ids[n]), *numbers, row.loss_weights[n].item())
            )
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
                            SampleKey(*group.prompt.key, g),
                            tuple(ids[:at]),
                            ids[at],
                            g + 10.0 * group.prompt.index,
                            float(completion.logprobs[r]),
                            float(np.float32(weight[aggregation])),
                        )
                    )
    return tokens


def sequences_of(groups: Sequence[RolloutGroup]) -> dict[SampleKey, tuple[int, ...]]:
    """Prompt and response of each sequence with a trained token."""
    return {
        SampleKey(*group.prompt.key, sample): (
            *group.prompt.token_ids.tolist(),
            *completion.token_ids.tolist(),
        )
        for group in groups
        for sample, completion in enumerate(group.completions)
        if completion.loss_mask.any()
    }


@st.composite
def random_groups(draw: st.DrawFn, max_groups: int = 4) -> list[RolloutGroup]:
    """Any lengths and group sizes, empty and truncated responses, masks inside.

    Half of the time with two words only, so that sequences share beginnings of all lengths, are
    beginnings of each other, and are equal.
    """
    groups = []
    few_words = draw(st.booleans())
    for index in range(draw(st.integers(0, max_groups))):
        lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
        group = random_group(
            np.random.default_rng(draw(st.integers(0, 1000))),
            draw(st.integers(1, 9)),
            lengths,
            index=index,
            masked=draw(st.sampled_from([0.0, 0.5, 1.0])),
            truncated=tuple(draw(st.sets(st.integers(0, 3)))),
        )
        if few_words:
            # Rarely the second word: long beginnings in common.
            for token_ids in (group.prompt.token_ids, *(c.token_ids for c in group.completions)):
                token_ids[:] = 1 + (token_ids % 5 == 0)
        groups.append(group)
    return groups
