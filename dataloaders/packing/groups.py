"""Groups → packed rows. A beginning that several sequences share goes through the model once.

``prompt``: ``[prompt | response 1 | … | response G]``, several groups in a row (paper §4.2).
``tree``: responses that begin alike share that too, and so do prompts; the row is the prefix tree
of its sequences. Loss and gradients are the same: a token's hidden state depends on its past alone.
``none``: nothing is shared, the prompt stands before each response. ``padded``: as ``none``, for
models that run a row as a padded batch.

Episodes are packed as ``tree`` where ``prompt`` is said: what they share is not one prompt.

Which tokens are trained, with what advantages and weights, is the recipe's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from easyrl.dataloaders.packing.cost import DEFAULT_COST, RowCost
from easyrl.dataloaders.packing.episodes import branch_parts
from easyrl.dataloaders.packing.plans import PromptRows, RowPlan, TreeRows
from easyrl.dataloaders.packing.row import TrainedSequence, packed_row
from easyrl.dataloaders.packing.unshared import PaddedRows, UnsharedRows
from easyrl.schema import (
    Completion,
    Key,
    MicroBatch,
    SampleKey,
    TrainedGroup,
    TrainedResponse,
)

Packing = Literal["prompt", "tree", "none", "padded"]
_PLANS: dict[Packing, type[RowPlan]] = {
    "prompt": PromptRows,
    "tree": TreeRows,
    "none": UnsharedRows,
    "padded": PaddedRows,
}


def pack_groups(
    groups: Sequence[TrainedGroup],
    *,
    max_tokens_per_micro_batch: int,
    packing: Packing = "prompt",
    keep_order: bool = True,
    whole_groups: bool = False,
    cost: RowCost = DEFAULT_COST,
    min_rows: int = 1,
) -> list[MicroBatch]:
    """Packs ``groups`` into rows of at most ``max_tokens_per_micro_batch`` tokens as packed.

    Rows are a function of the arguments alone. With ``keep_order`` a row holds groups that follow
    each other as given; else any, so that there are few rows, of even ``cost``. A group that does
    not fit into a row of its own is split by responses, its prompt repeated, and without
    ``keep_order`` also one that fits, where the rows that this saves are worth it. What cannot be
    split gets a row of its own, however long: a prompt with one response, with ``whole_groups`` a
    group. The list is empty if no token is trained. Without ``keep_order`` there are ``min_rows``
    rows at least, if groups suffice and each row has ``LEAST_TOKENS``; not with ``padded``.
    """
    sequences: list[TrainedSequence] = []
    members: list[list[int]] = []  # of each group that has some
    for group in groups:
        if group.responses:
            first = len(sequences)
            sequences += _sequences(group)
            members.append(list(range(first, len(sequences))))
    if not sequences:
        return []
    if packing == "prompt" and any(map(_has_episodes, groups)):
        packing = "tree"
    plan = _PLANS[packing](
        sequences, members, max_tokens_per_micro_batch, cost, whole_groups, min_rows
    )
    return [packed_row(sequences, plan.order_of(row)) for row in plan.rows(keep_order)]


def _has_episodes(trained: TrainedGroup) -> bool:
    return any(completion.episode is not None for completion in trained.group.completions)


def _sequences(trained: TrainedGroup) -> list[TrainedSequence]:
    group = trained.group
    prompt = group.prompt.token_ids
    assert len(prompt), "the first token of a response needs a position that predicts it"
    sequences = []
    for response in trained.responses:
        completion = group.completions[response.sample]
        if completion.episode is not None:
            sequences += _of_episode(group.prompt.key, completion, response)
            continue
        assert len(completion.token_ids) == len(completion.logprobs)
        assert len(response.tokens) == len(response.advantages) == len(response.loss_weights) > 0
        sequences.append(
            TrainedSequence(
                SampleKey(*group.prompt.key, response.sample),
                completion.endpoint,
                np.concatenate([prompt, completion.token_ids]),
                len(prompt),
                response.tokens + len(prompt),
                completion.logprobs[response.tokens],
                response.advantages,
                response.loss_weights,
                response.returns,
            )
        )
    return sequences


def _of_episode(
    prompt: Key, completion: Completion, response: TrainedResponse
) -> list[TrainedSequence]:
    return [
        TrainedSequence(
            SampleKey(*prompt, response.sample, part.number),
            part.endpoint,
            part.token_ids,
            0,
            part.trained,
            completion.logprobs[response.tokens[part.chosen]],
            response.advantages[part.chosen],
            response.loss_weights[part.chosen],
            None if response.returns is None else response.returns[part.chosen],
        )
        for part in branch_parts(completion, response.tokens)
    ]
