"""What is computed along the rows of a chunk of logits: sums over the vocabulary, gradients.

The logits are read, and at last overwritten by their gradient, a few rows at a time, so that the
passes over a row find it in the processor's cache and the work space is a few rows, not a chunk.

Shape legend: C positions of a chunk, V the part of the vocabulary held here; z are the logits
after temperature, in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of a block of rows: on a CPU what a core's cache holds, elsewhere few kernel launches.
BLOCK_NUMEL = 2**18
DEVICE_BLOCK_NUMEL = 2**24


class RowSums(NamedTuple):
    """Sums over the vocabulary held here; all [C], in the softmax's dtype.

    They can be combined over parts of the vocabulary: the online softmax of Milakov and
    Gimelshein, "Online normalizer calculation for softmax" (2018), with one more sum.
    """

    maximum: Tensor  # m = max z
    exp_sum: Tensor  # sum of exp(z - m)
    weighted_sum: Tensor  # sum of exp(z - m) (z - m)
    label_logit: Tensor  # z of the label


class RowValues(NamedTuple):
    """Of the whole vocabulary; all [C], in the softmax's dtype."""

    logsumexp: Tensor
    logprobs: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, sums: RowSums) -> RowValues:
        # Differences to the maximum are taken first: they keep more digits than logsumexp.
        log_exp_sum = sums.exp_sum.log()
        return cls(
            logsumexp=sums.maximum + log_exp_sum,
            logprobs=(sums.label_logit - sums.maximum) - log_exp_sum,
            entropy=log_exp_sum - sums.weighted_sum / sums.exp_sum,
        )


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sums(logits: Tensor, labels: Tensor, temperature: float) -> RowSums:
    """``logits`` [C, V] before temperature, only read; ``labels`` int64 [C] in [0, V)."""
    dtype = softmax_dtype(logits.dtype)
    sums = RowSums(*logits.new_empty((4, logits.shape[0]), dtype=dtype).unbind())
    as_it_is = temperature == 1.0 and logits.dtype == dtype
    work: Tensor | None = None
    for rows in row_blocks(logits):
        if work is None:  # the first block is the largest
            work = logits.new_empty((2, rows.stop, logits.shape[1]), dtype=dtype)
        shifted, exp = work[:, : rows.stop - rows.start]
        scaled = logits[rows] if as_it_is else shifted.copy_(logits[rows]).div_(temperature)
        sums.label_logit[rows] = scaled.gather(1, labels[rows, None]).squeeze(1)
        torch.amax(scaled, dim=-1, out=sums.maximum[rows])
        torch.sub(scaled, sums.maximum[rows, None], out=shifted)
        torch.exp(shifted, out=exp)
        torch.sum(exp, dim=-1, out=sums.exp_sum[rows])
        sums.weighted_sum[rows] = torch.linalg.vecdot(exp, shifted)
    return sums


def softmax_gradient_(
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_label: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
) -> None:
    """Overwrites ``logits`` [C, V] by the gradient of a loss in them; the other tensors are [C].

    With p the softmax of z and y the label:
    ``d logprob / dz = onehot(y) - p`` and ``d entropy / dz = -p (log p + entropy)``.
    ``grad_label`` is ``grad_logprobs`` where the label is one of these V, else 0. ``grad_entropy``
    None stands for zeros.
    """
    dtype = logsumexp.dtype
    by_logprob, by_label = grad_logprobs.div(-temperature), grad_label.div(temperature)
    by_entropy = None if grad_entropy is None else grad_entropy.div(-temperature)
    for rows in row_blocks(logits):
        block = logits[rows]
        logp = block if block.dtype == dtype else block.to(dtype)
        if temperature != 1.0:
            logp.div_(temperature)
        logp.sub_(logsumexp[rows, None])
        if by_entropy is None:
            gradient = logp.exp_().mul_(by_logprob[rows, None])
        else:
            probs = logp.exp()
            constant = by_logprob[rows] + by_entropy[rows] * entropy[rows]
            gradient = logp.mul_(by_entropy[rows, None]).add_(constant[:, None]).mul_(probs)
        gradient.scatter_add_(1, labels[rows, None], by_label[rows, None])
        if gradient is not block:
            block.copy_(gradient)  # the only rounding


def row_blocks(chunk: Tensor) -> Iterator[slice]:
    numel = BLOCK_NUMEL if chunk.device.type == "cpu" else DEVICE_BLOCK_NUMEL
    # At most half of a chunk, so that work space for two blocks is no more than a second chunk.
    size = max(1, min(numel // max(1, chunk.shape[1]), chunk.shape[0] // 2))
    for start in range(0, chunk.shape[0], size):
        yield slice(start, min(start + size, chunk.shape[0]))
