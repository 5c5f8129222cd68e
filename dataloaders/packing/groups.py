"""Groups → packed rows. A beginning that several sequences share goes through the model once.

``prompt``: ``[prompt | response 1 | … | response G]``, several groups in a row (paper §4.2).
``tree``: responses that begin alike share that too, and so do prompts; the row is the prefix tree
of its sequences. Loss and gradients are the same: a token's hidden state depends on its past alone.

Responses without a trained token are left out: nothing depends on them (their place in the batch's
denominator is ``batch_denominator``'s business).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from easyrl.dataloaders.packing.cost import DEFAULT_COST, RowCost
from easyrl.dataloaders.packing.plans import PromptRows, TreeRows
from easyrl.dataloaders.packing.row import Aggregation, TrainedSequence, packed_row
from easyrl.schema import Completion, MicroBatch, RolloutGroup, SampleKey

Packing = Literal["prompt", "tree"]
_PLANS: dict[Packing, type[PromptRows] | type[TreeRows]] = {"prompt": PromptRows, "tree": TreeRows}


def pack_groups(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    mask_truncated: bool,
    max_tokens_per_micro_batch: int,
    packing: Packing = "prompt",
    keep_order: bool = True,
    cost: RowCost = DEFAULT_COST,
) -> list[MicroBatch]:
    """Packs ``groups`` into rows of at most ``max_tokens_per_micro_batch`` tokens as packed.

    ``advantages`` has an array [G] for each group. Rows are a function of the arguments alone. With
    ``keep_order`` a row holds groups that follow each other as given; else any, so that there are
    few rows, of even ``cost``. A group that does not fit into a row of its own is split by
    responses, its prompt repeated, and without ``keep_order`` also one that fits, where the rows
    that this saves are worth it; a prompt with one response that exceeds the budget gets its own
    row. The list is empty if no token is trained. Weights of the loss sum:
    1 / (trained tokens of the sequence) for ``sequence``, 1 for ``token``, 1 / ``max_tokens`` for
    ``constant``; see ``batch_denominator`` for the scalar that completes each.
    """
    assert len(groups) == len(advantages)
    sequences: list[TrainedSequence] = []
    members: list[list[int]] = []  # of each group that has some
    for group, group_advantages in zip(groups, advantages, strict=True):
        found = _trained_sequences(group, group_advantages, mask_truncated)
        if found:
            members.append(list(range(len(sequences), len(sequences) + len(found))))
            sequences += found
    if not sequences:
        return []
    plan = _PLANS[packing](sequences, members, max_tokens_per_micro_batch, cost)
    return [
        packed_row(sequences, plan.order_of(row), aggregation, max_tokens)
        for row in plan.rows(keep_order)
    ]


def batch_denominator(
    groups: Sequence[RolloutGroup], aggregation: Aggregation, mask_truncated: bool
) -> float:
    """The scalar that divides the summed loss of ``groups``; over ranks and rows it adds up.

    ``sequence`` (GRPO) and ``constant`` (Dr. GRPO) count all sequences, those without a trained
    token too; ``token`` (DAPO) counts trained tokens. The counting is that of TRL's losses
    ``grpo``, ``dr_grpo`` and ``dapo``. Zero if there is nothing to count.
    """
    completions = [completion for group in groups for completion in group.completions]
    if aggregation == "token":
        return float(sum(int(_loss_mask(c, mask_truncated).sum()) for c in completions))
    return float(len(completions))


def _loss_mask(completion: Completion, mask_truncated: bool) -> np.ndarray:
    """bool [R], the tokens of a response that are trained."""
    if mask_truncated and completion.truncated:
        return np.zeros_like(completion.loss_mask)
    return completion.loss_mask


def _trained_sequences(
    group: RolloutGroup, advantages: np.ndarray, mask_truncated: bool
) -> list[TrainedSequence]:
    assert advantages.shape == (len(group.completions),)
    prompt = group.prompt.token_ids
    sequences = []
    for sample, completion in enumerate(group.completions):
        assert completion.loss_mask.dtype == np.bool_
        assert len(completion.token_ids) == len(completion.loss_mask) == len(completion.logprobs)
        trained = np.flatnonzero(_loss_mask(completion, mask_truncated))
        if len(trained):
            assert len(prompt), "the first token of a response needs a position that predicts it"
            sequences.append(
                TrainedSequence(
                    SampleKey(*group.prompt.key, sample),
                    np.concatenate([prompt, completion.token_ids]),
                    len(prompt),
                    trained + len(prompt),
                    completion.logprobs[trained],
                    float(advantages[sample]),
                )
            )
    return sequences
