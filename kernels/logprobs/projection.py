"""The projection to the vocabulary, a chunk of positions at a time, and the sums of its gradients.

What ``linear_logprob.py`` and ``linear_divergence.py`` have in common: neither the logits nor their
gradient ever exist for more than a chunk.

Shape legend: N positions, H hidden size, V vocabulary (in a process's part of one that is split:
the rows that the part holds), C chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from easyrl.kernels.logprobs.row_functions import row_functions
from easyrl.kernels.logprobs.vocab_shard import VocabShard
from easyrl.kernels.logprobs.vocab_softmax import RowValues, row_blocks, softmax_dtype

WEIGHT_ROWS = 8192  # of a rounded product that is added to the weight's gradient at a time


class Projection(NamedTuple):
    """The projection and its positions, a chunk at a time."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    temperature: float
    chunk_size: int
    shard: VocabShard | None
    soft_cap: float | None = None  # c: the logits are c · tanh(x / c) of the product x

    def check(self) -> None:
        hidden, weight, bias, labels, temperature, chunk_size, shard, soft_cap = self
        if hidden.ndim != 2 or labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(
                f"hidden is {tuple(hidden.shape)} and labels {labels.dtype} "
                f"{tuple(labels.shape)}; they have to be [N, H] and int64 [N]"
            )
        vocab = weight.shape[:1]
        if weight.shape[1:] != hidden.shape[1:] or (bias is not None and bias.shape != vocab):
            shapes = [None if x is None else tuple(x.shape) for x in (weight, bias)]
            raise ValueError(
                f"weight and bias are {shapes}; they have to be [V, {hidden.shape[1]}] and [V]"
            )
        if shard is not None and not weight.shape[0] == shard.size >= 1:
            raise ValueError(f"weight has {weight.shape[0]} rows and its shard is {shard}")
        if temperature <= 0 or chunk_size < 1:
            raise ValueError(
                f"temperature is {temperature} and chunk_size {chunk_size}; both have to "
                "be positive"
            )
        if soft_cap is not None and soft_cap <= 0:
            raise ValueError(f"soft_cap is {soft_cap}; it has to be positive, or None for no cap")

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Positions and their logits [C, V] before temperature, in the inputs' dtype; those of all
        chunks are written into the same memory."""
        num_tokens, size = len(self.hidden), self.chunk_size
        memory = self.hidden.new_empty(min(size, num_tokens), len(self.weight))
        for start in range(0, num_tokens, size):
            rows = slice(start, min(start + size, num_tokens))
            logits = memory[: rows.stop - rows.start]
            if self.bias is None:
                torch.mm(self.hidden[rows], self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=logits)
            if self.soft_cap is not None:
                _cap_(logits, self.soft_cap)
            yield rows, logits

    def values(self, logits: Tensor, rows: slice) -> RowValues:
        labels, held = self.labels[rows], None
        if self.shard is not None:
            labels, held = self.shard.local_labels(labels)
        sums = row_functions(logits).row_sums(logits, labels, self.temperature)
        if self.shard is not None and held is not None:
            sums = self.shard.combine(sums, held)
        return RowValues.of(sums)

    def logit_gradient_(
        self,
        logits: Tensor,
        rows: slice,
        logsumexp: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        """Overwrites the ``logits`` of ``rows`` by a loss's gradient in the product that they are
        of; the rest is [C].
        """
        slope = self.slope(logits)
        self.capped_gradient_(logits, rows, logsumexp, entropy, grad_logprobs, grad_entropy)
        if slope is not None:
            logits.mul_(slope)

    def slope(self, logits: Tensor) -> Tensor | None:
        """[C, V] of the ``logits`` in the product before the cap; None: it is 1 everywhere."""
        if self.soft_cap is None:
            return None
        share = logits / self.soft_cap
        return share.square_().neg_().add_(1.0)

    def capped_gradient_(
        self,
        logits: Tensor,
        rows: slice,
        logsumexp: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        """As ``logit_gradient_``, in the logits as they are, behind the cap."""
        labels, grad_label = self.labels[rows], grad_logprobs
        if self.shard is not None:
            labels, held = self.shard.local_labels(labels)
            grad_label = grad_logprobs.where(held, grad_logprobs.new_zeros(()))
        row_functions(logits).softmax_gradient_(
            logits,
            labels,
            logsumexp,
            entropy,
            grad_logprobs,
            grad_label,
            grad_entropy,
            self.temperature,
        )


class ProjectionGradients:
    """Sums over the chunks; those of weight and bias in the softmax's precision, rounded once.

    A chunk's part of the weight's may be rounded before; see ``_add_product_``.
    """

    def __init__(self, head: Projection, needed: Sequence[bool]) -> None:
        hidden, weight, bias, *_ = head
        dtype = softmax_dtype(hidden.dtype)
        self._head = head
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add(self, grad_logits: Tensor, rows: slice) -> None:
        """Those of positions ``rows``, whose gradient in the logits is ``grad_logits`` [C, V]."""
        hidden, weight, shard = self._head.hidden, self._head.weight, self._head.shard
        if self._hidden is not None:
            grad_hidden = torch.mm(grad_logits, weight, out=self._hidden[rows])
            if shard is not None:
                shard.sum_hidden_gradient_(grad_hidden)
        if self._weight is not None:
            _add_product_(self._weight, grad_logits, hidden[rows])
        if self._bias is not None:
            for block in row_blocks(grad_logits):
                self._bias.add_(grad_logits[block].sum(0, dtype=self._bias.dtype))

    def scale_(self, factor: Tensor) -> None:
        """``factor`` is a scalar."""
        # Reading a number back would stop a device; a pass over the gradients costs less there.
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return
        for gradient in (self._hidden, self._weight, self._bias):
            if gradient is not None:
                gradient.mul_(factor)

    def rounded(self) -> list[Tensor | None]:
        """Of hidden, weight and bias in their own dtypes; None where not needed."""
        pairs = zip((self._hidden, self._weight, self._bias), self._head[:3], strict=True)
        return [None if g is None or x is None else g.to(x.dtype) for g, x in pairs]


def _cap_(logits: Tensor, soft_cap: float) -> None:
    """``soft_cap · tanh(logits / soft_cap)`` in place, rounded once."""
    for rows in row_blocks(logits):
        block = logits[rows].to(softmax_dtype(logits.dtype))
        logits[rows] = block.div(soft_cap).tanh_().mul_(soft_cap)


def _add_product_(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """``total`` [V, H] plus ``grad_logitsᵀ · hidden``."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
        return
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device)[0] >= 8:
        # Not rounded at all, and no pass of its own over the sum.
        torch.addmm(total, grad_logits.t(), hidden, out_dtype=total.dtype, out=total)
        return
    # Elsewhere a product's result has its factors' dtype, so that each is rounded.
    for start in range(0, total.shape[0], WEIGHT_ROWS):  # no second [V, H]
        vocab = slice(start, start + WEIGHT_ROWS)
        total[vocab].add_(grad_logits[:, vocab].t() @ hidden)
