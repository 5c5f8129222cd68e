"""Parts of a packed row: a smaller row of some sequences, and what belongs to each sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from easyrl.schema import FrozenLogprobs, MicroBatch, SampleKey, Segment


def restrict(row: MicroBatch, sequences: Collection[SampleKey]) -> MicroBatch:
    """``row`` with the trained tokens of ``sequences`` alone, and without the segments that those
    do not depend on.

    A trained token depends on the segment of its predictor and on that segment's ancestors, which
    see nothing else: a model says of each token what it says of it in the whole row. ``sequences``
    are of the row, at least one.
    """
    kept = [q for q, key in enumerate(row.sequences) if key in sequences]
    assert len(kept) == len(sequences) > 0
    tokens = torch.isin(row.sequence_index, torch.tensor(kept))  # bool [N]
    predictors = row.predictor_index[tokens]
    segments, positions = _with_ancestors(row.segments, predictors)
    place = torch.full_like(row.input_ids, -1)
    place[positions] = torch.arange(len(positions))
    number = torch.full((len(row.sequences),), -1)
    number[kept] = torch.arange(len(kept))
    return replace(
        row,
        input_ids=row.input_ids[positions],
        position_ids=row.position_ids[positions],
        segments=segments,
        predictor_index=place[predictors],
        label_ids=row.label_ids[tokens],
        advantages=row.advantages[tokens],
        inference_logprobs=row.inference_logprobs[tokens],
        loss_weights=row.loss_weights[tokens],
        sequence_index=number[row.sequence_index[tokens]],
        sequences=tuple(row.sequences[q] for q in kept),
        endpoints=tuple(row.endpoints[q] for q in kept),
        frozen=None,
        returns=None if row.returns is None else row.returns[tokens],
    )


def split(row: MicroBatch, values: Tensor) -> dict[SampleKey, Tensor]:
    """``values`` [N] of each sequence's trained tokens, in their order."""
    order, counts = torch.unique_consecutive(row.sequence_index, return_counts=True)
    parts = values.split(counts.tolist())
    return {row.sequences[q]: part for q, part in zip(order.tolist(), parts, strict=True)}


def split_logprobs(row: MicroBatch, frozen: FrozenLogprobs) -> dict[SampleKey, FrozenLogprobs]:
    """What ``frozen`` says of each sequence's trained tokens, in their order."""
    said = {each.name: getattr(frozen, each.name) for each in fields(frozen)}
    parts = {name: split(row, values) for name, values in said.items() if values is not None}
    nothing: dict[str, Tensor | None] = dict.fromkeys(said)
    return {
        key: FrozenLogprobs(**nothing | {name: own[key] for name, own in parts.items()})
        for key in split(row, row.label_ids)
    }


def join_logprobs(row: MicroBatch, parts: Mapping[SampleKey, FrozenLogprobs]) -> FrozenLogprobs:
    """Inverse of ``split_logprobs``; ``parts`` has all sequences of ``row``."""
    ordered = [parts[key] for key in split(row, row.label_ids)]

    def joined(said: list[Tensor | None]) -> Tensor | None:
        there = [values for values in said if values is not None]
        if not there:
            return None
        whole = torch.cat(there)
        assert len(there) == len(said) and len(whole) == row.num_loss_tokens
        return whole

    names = [each.name for each in fields(FrozenLogprobs)]
    return FrozenLogprobs(**{n: joined([getattr(part, n) for part in ordered]) for n in names})


def _with_ancestors(
    segments: tuple[Segment, ...], predictors: Tensor
) -> tuple[tuple[Segment, ...], Tensor]:
    """The segments of ``predictors`` and all above them, renumbered; their row positions."""
    starts = [segment.start for segment in segments]
    kept: set[int] = set()
    for position in torch.unique(predictors).tolist():
        index = bisect_right(starts, position) - 1
        while index >= 0 and index not in kept:
            kept.add(index)
            index = segments[index].parent
    number = {old: new for new, old in enumerate(sorted(kept))} | {-1: -1}
    renumbered: list[Segment] = []
    positions: list[Tensor] = []
    end = 0
    for old in sorted(kept):  # still depth first
        start, length, parent = segments[old]
        renumbered.append(Segment(end, length, number[parent]))
        positions.append(torch.arange(start, start + length))
        end += length
    return tuple(renumbered), torch.cat(positions)
