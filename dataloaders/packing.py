"""Groups → packed rows: ``[prompt | response 1 | … | response G]``, several groups in a row.

A prompt goes through the model once for all its responses. Responses without a trained token are
left out of the row: nothing depends on them (their place in the batch's denominator is
``batch_denominator``'s business).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from easyrl.schema import Completion, MicroBatch, Prompt, RolloutGroup, SampleKey, Segment

Aggregation = Literal["sequence", "token", "constant"]


def pack_groups(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    mask_truncated: bool,
    max_tokens_per_micro_batch: int,
) -> list[MicroBatch]:
    """Packs ``groups`` in the given order into rows of at most ``max_tokens_per_micro_batch``
    tokens.

    ``advantages`` has an array [G] for each group. A group that does not fit into a row of its own
    is split by responses, its prompt repeated; a prompt with one response that exceeds the budget
    gets its own row. The list is empty if no token is trained. Weights of the loss sum: 1 /
    (trained tokens of the sequence) for ``sequence``, 1 for ``token``, 1 / ``max_tokens`` for
    ``constant``; see ``batch_denominator`` for the scalar that completes each.
    """
    assert len(groups) == len(advantages)
    rows = [_Row()]
    for group, group_advantages in zip(groups, advantages, strict=True):
        responses = _trained_responses(group, group_advantages, mask_truncated)
        for part in _split(group.prompt, responses, max_tokens_per_micro_batch):
            cost = len(group.prompt.token_ids) + sum(len(r.token_ids) for r in part)
            if rows[-1].num_tokens and rows[-1].num_tokens + cost > max_tokens_per_micro_batch:
                rows.append(_Row())
            rows[-1].add(group.prompt, part)
    return [row.micro_batch(aggregation, max_tokens) for row in rows if row.num_tokens]


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


def dummy_micro_batch() -> MicroBatch:
    """Two tokens, one of them trained with weight zero: keeps collectives equal between ranks."""
    return MicroBatch(
        input_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2),
        segments=(Segment(0, 1, -1), Segment(1, 1, 0)),
        predictor_index=torch.zeros(1, dtype=torch.int64),
        label_ids=torch.zeros(1, dtype=torch.int64),
        advantages=torch.zeros(1),
        inference_logprobs=torch.zeros(1),
        loss_weights=torch.zeros(1),
        sequence_index=torch.zeros(1, dtype=torch.int64),
        sequences=(SampleKey(0, 0, 0),),
        is_dummy=True,
    )


def _loss_mask(completion: Completion, mask_truncated: bool) -> np.ndarray:
    """bool [R], the tokens of a response that are trained."""
    if mask_truncated and completion.truncated:
        return np.zeros_like(completion.loss_mask)
    return completion.loss_mask


@dataclass(frozen=True, slots=True)
class _Response:
    key: SampleKey
    token_ids: np.ndarray  # [R]
    logprobs: np.ndarray  # [R]
    trained: np.ndarray  # int [n], the offsets of trained tokens
    advantage: float


def _trained_responses(
    group: RolloutGroup, advantages: np.ndarray, mask_truncated: bool
) -> list[_Response]:
    assert advantages.shape == (len(group.completions),)
    responses = []
    for sample, completion in enumerate(group.completions):
        assert completion.loss_mask.dtype == np.bool_
        assert len(completion.token_ids) == len(completion.loss_mask) == len(completion.logprobs)
        trained = np.flatnonzero(_loss_mask(completion, mask_truncated))
        if len(trained):
            responses.append(
                _Response(
                    SampleKey(*group.prompt.key, sample),
                    completion.token_ids,
                    completion.logprobs,
                    trained,
                    float(advantages[sample]),
                )
            )
    return responses


def _split(prompt: Prompt, responses: Sequence[_Response], budget: int) -> list[list[_Response]]:
    """Consecutive parts that fit into a row behind the prompt; a part has at least one response."""
    parts: list[list[_Response]] = []
    room = 0
    for response in responses:
        if not parts or len(response.token_ids) > room:
            parts.append([])
            room = budget - len(prompt.token_ids)
        parts[-1].append(response)
        room -= len(response.token_ids)
    return parts


@dataclass(slots=True)
class _Row:
    """A row being filled; arrays are joined and become tensors once, at the end."""

    num_tokens: int = 0
    segments: list[Segment] = field(default_factory=list)
    input_ids: list[np.ndarray] = field(default_factory=list)
    position_ids: list[np.ndarray] = field(default_factory=list)
    predictor_index: list[np.ndarray] = field(default_factory=list)
    label_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    trained_per_sequence: list[int] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    sequences: list[SampleKey] = field(default_factory=list)

    def add(self, prompt: Prompt, responses: Sequence[_Response]) -> None:
        prompt_length = len(prompt.token_ids)
        assert prompt_length > 0, "the first token of a response needs a position that predicts it"
        prompt_end = self.num_tokens + prompt_length - 1
        root = self._add_segment(prompt.token_ids, first_position=0, parent=-1)
        for response in responses:
            start = self.num_tokens
            self._add_segment(response.token_ids, first_position=prompt_length, parent=root)
            predictors = start + response.trained - 1  # the token before, in the row ...
            predictors[response.trained == 0] = prompt_end  # ... but for a response's first token
            self.predictor_index.append(predictors)
            self.label_ids.append(response.token_ids[response.trained])
            self.logprobs.append(response.logprobs[response.trained])
            self.trained_per_sequence.append(len(response.trained))
            self.advantages.append(response.advantage)
            self.sequences.append(response.key)

    def _add_segment(self, token_ids: np.ndarray, first_position: int, parent: int) -> int:
        self.segments.append(Segment(self.num_tokens, len(token_ids), parent))
        self.input_ids.append(token_ids)
        self.position_ids.append(np.arange(first_position, first_position + len(token_ids)))
        self.num_tokens += len(token_ids)
        return len(self.segments) - 1

    def micro_batch(self, aggregation: Aggregation, max_tokens: int) -> MicroBatch:
        counts = np.array(self.trained_per_sequence)
        weights = {
            "sequence": 1.0 / counts,
            "token": np.ones(len(counts)),
            "constant": np.full(len(counts), 1.0 / max_tokens),
        }[aggregation]
        return MicroBatch(
            input_ids=_int64(np.concatenate(self.input_ids)),
            position_ids=_int64(np.concatenate(self.position_ids)),
            segments=tuple(self.segments),
            predictor_index=_int64(np.concatenate(self.predictor_index)),
            label_ids=_int64(np.concatenate(self.label_ids)),
            advantages=_float32(np.repeat(self.advantages, counts)),
            inference_logprobs=_float32(np.concatenate(self.logprobs)),
            loss_weights=_float32(np.repeat(weights, counts)),
            sequence_index=_int64(np.repeat(np.arange(len(counts)), counts)),
            sequences=tuple(self.sequences),
        )


def _int64(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _float32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))
