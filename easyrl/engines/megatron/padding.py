"""Rows that are made longer, or added, where the layout of a split model asks for it."""

from __future__ import annotations

from dataclasses import replace

import torch

from easyrl.schema import MicroBatch, SampleKey, Segment


def padded_row(row: MicroBatch, multiple: int) -> MicroBatch:
    """``row`` with its number of tokens T raised to a multiple, by a segment that nothing sees and
    that is not trained (sequence parallelism)."""
    missing = -row.num_tokens % multiple
    if missing == 0:
        return row
    zeros = torch.zeros(missing, dtype=torch.int64, device=row.input_ids.device)
    return replace(
        row,
        input_ids=torch.cat([row.input_ids, zeros]),
        position_ids=torch.cat([row.position_ids, torch.arange(missing, device=zeros.device)]),
        segments=(*row.segments, Segment(row.num_tokens, missing, -1)),
    )


def row_of_nothing() -> MicroBatch:
    """One token that predicts itself, without weight: for a schedule that needs one more row."""
    zero, none = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return MicroBatch(
        input_ids=zero,
        position_ids=zero,
        segments=(Segment(0, 1, -1),),
        predictor_index=zero,
        label_ids=zero,
        advantages=none,
        inference_logprobs=none,
        loss_weights=none,
        sequence_index=zero,
        sequences=(SampleKey(-1, -1, -1),),
        endpoints=("",),
        is_dummy=True,
    )
