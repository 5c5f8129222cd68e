"""Rows of a length that tensor-parallel ranks can share (sequence parallelism)."""

from __future__ import annotations

from dataclasses import replace

import torch

from easyrl.schema import MicroBatch, Segment


def padded_row(row: MicroBatch, multiple: int) -> MicroBatch:
    """``row`` with its number of tokens T raised to a multiple, by a segment that nothing sees and
    that is not trained."""
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
