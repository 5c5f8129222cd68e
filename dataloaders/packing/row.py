"""One packed row as the model takes it, from sequences and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from easyrl.dataloaders.packing.prefix_tree import PrefixTree, SharedOrder
from easyrl.schema import MicroBatch, SampleKey


@dataclass(frozen=True, slots=True)
class TrainedSequence:
    """A prompt with one of its responses, of which some tokens are trained."""

    key: SampleKey
    endpoint: str  # URL, that sampled the response
    token_ids: np.ndarray  # int32 [P + R]
    # P, what all of its group begin with: at least 1, as the first token of a response needs one
    # that predicts it; 0 of a part of an episode, whose beginnings only a tree knows
    prompt_length: int
    trained: np.ndarray  # int64 [n], places of the trained tokens, all of them behind the prompt
    logprobs: np.ndarray  # float32 [n], the server's
    advantages: np.ndarray  # float [n]
    loss_weights: np.ndarray  # float [n]
    returns: np.ndarray | None = None  # float [n]; None without a critic


def packed_row(sequences: Sequence[TrainedSequence], order: SharedOrder) -> MicroBatch:
    """The row of those of ``sequences`` that ``order`` names.

    The input has each beginning that ``order`` says is shared once, depth first. The trained tokens
    stand sequence by sequence, in the order of ``sequences``, each with its own advantage and
    weight, also where sequences share it.
    """
    tree = PrefixTree(order)
    placed = zip(order.index.tolist(), order.shared.tolist(), strict=True)
    runs = [sequences[index].token_ids[shared:] for index, shared in placed]
    places = np.argsort(order.index)
    chosen = [sequences[index] for index in order.index[places].tolist()]
    counts = np.array([len(sequence.trained) for sequence in chosen])
    predictors = [
        tree.positions(place, sequence.trained - 1)
        for place, sequence in zip(places.tolist(), chosen, strict=True)
    ]
    return MicroBatch(
        input_ids=_int64(np.concatenate(runs)),
        position_ids=_int64(tree.depths),
        segments=tree.segments,
        predictor_index=_int64(np.concatenate(predictors)),
        label_ids=_int64(np.concatenate([s.token_ids[s.trained] for s in chosen])),
        advantages=_float32(np.concatenate([s.advantages for s in chosen])),
        inference_logprobs=_float32(np.concatenate([s.logprobs for s in chosen])),
        loss_weights=_float32(np.concatenate([s.loss_weights for s in chosen])),
        returns=_returns(chosen),
        sequence_index=_int64(np.repeat(np.arange(len(counts)), counts)),
        sequences=tuple(sequence.key for sequence in chosen),
        endpoints=tuple(sequence.endpoint for sequence in chosen),
    )


def dummy_micro_batch() -> MicroBatch:
    """Two tokens, one of them trained with weight zero: keeps collectives equal between ranks."""
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    tokens = np.zeros(2, dtype=np.int32)
    sequence = TrainedSequence(SampleKey(0, 0, 0), "", tokens, 1, one, zero, zero, zero)
    return replace(packed_row([sequence], SharedOrder(zero, 2 * one, zero)), is_dummy=True)


def _returns(sequences: Sequence[TrainedSequence]) -> torch.Tensor | None:
    given = [each.returns for each in sequences if each.returns is not None]
    assert len(given) in (0, len(sequences))
    return _float32(np.concatenate(given)) if given else None


def _int64(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _float32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))
