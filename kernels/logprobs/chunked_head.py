"""A projection to the vocabulary that is walked a chunk of positions at a time.

Shape legend: N positions, H hidden size, C chunk, V vocabulary (in a process's part of one that is
split: the rows that the part holds).
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


class Settings(NamedTuple):
    """Of a projection; see ``linear_logprobs``."""

    temperature: float
    chunk_size: int
    shard: VocabShard | None

    def check(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
        """Raises ``ValueError`` for what cannot be."""
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
        if self.shard is not None and not weight.shape[0] == self.shard.size >= 1:
            raise ValueError(f"weight has {weight.shape[0]} rows and its shard is {self.shard}")
        if self.temperature <= 0 or self.chunk_size < 1:
            raise ValueError(
                f"temperature is {self.temperature} and chunk_size {self.chunk_size}; both have to "
                "be positive"
            )


class ChunkedHead:
    """One walk over N positions. The logits of all chunks are written into the same memory."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: Settings,
    ) -> None:
        self._hidden, self._weight, self._bias, self._labels = hidden, weight, bias, labels
        self._settings = settings

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Positions and their logits [C, V] before temperature, in the inputs' dtype."""
        num_tokens, size = len(self._hidden), self._settings.chunk_size
        memory = self._hidden.new_empty(min(size, num_tokens), len(self._weight))
        for start in range(0, num_tokens, size):
            rows = slice(start, min(start + size, num_tokens))
            logits = memory[: rows.stop - rows.start]
            if self._bias is None:
                torch.mm(self._hidden[rows], self._weight.t(), out=logits)
            else:
                torch.addmm(self._bias, self._hidden[rows], self._weight.t(), out=logits)
            yield rows, logits

    def values(self, logits: Tensor, rows: slice) -> RowValues:
        labels, (temperature, _, shard) = self._labels[rows], self._settings
        if shard is None:
            return RowValues.of(row_functions(logits).row_sums(logits, labels, temperature))
        labels, held = shard.local_labels(labels)
        sums = row_functions(logits).row_sums(logits, labels, temperature)
        return RowValues.of(shard.combine(sums, held))

    def gradient_(
        self,
        logits: Tensor,
        rows: slice,
        logsumexp: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        """Overwrites ``logits`` by the gradient in them."""
        labels, grad_label = self._labels[rows], grad_logprobs
        if self._settings.shard is not None:
            labels, held = self._settings.shard.local_labels(labels)
            grad_label = grad_logprobs.where(held, grad_logprobs.new_zeros(()))
        row_functions(logits).softmax_gradient_(
            logits,
            labels,
            logsumexp,
            entropy,
            grad_logprobs,
            grad_label,
            grad_entropy,
            self._settings.temperature,
        )


class HeadGradients:
    """Sums over the chunks; those of weight and bias in the softmax's precision, rounded once.

    A chunk's part of the weight's may be rounded before; see ``_add_product_``.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: Sequence[bool],
        shard: VocabShard | None,
    ) -> None:
        dtype = softmax_dtype(hidden.dtype)
        self._inputs, self._shard = (hidden, weight), shard
        self._dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """Those of positions ``rows``, from the gradient in their logits [C, V]."""
        hidden, weight = self._inputs
        if self.hidden is not None:
            grad_hidden = torch.mm(grad_logits, weight, out=self.hidden[rows])
            if self._shard is not None:
                self._shard.sum_hidden_gradient_(grad_hidden)
        if self.weight is not None:
            _add_product_(self.weight, grad_logits, hidden[rows])
        if self.bias is not None:
            for block in row_blocks(grad_logits):
                self.bias.add_(grad_logits[block].sum(0, dtype=self.bias.dtype))

    def scale_(self, factor: Tensor) -> None:
        """``factor`` is a scalar."""
        # Reading a number back would stop a device; a pass over the gradients costs less there.
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)

    def rounded(self) -> tuple[Tensor | None, ...]:
        """Of hidden, weight and bias in their own dtypes; None where not needed."""
        return tuple(
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(
                (self.hidden, self.weight, self.bias), self._dtypes, strict=True
            )
        )


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
