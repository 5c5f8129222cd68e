"""A projection to the vocabulary that is walked a chunk of positions at a time.

Shape legend: N positions, H hidden size, C chunk, V vocabulary (in a process's part of one that is
split: the rows that the part holds).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from easyrl.kernels.logprobs import vocab_softmax
from easyrl.kernels.logprobs.row_functions import RowFunctions, checked
from easyrl.kernels.logprobs.vocab_softmax import RowSums, RowValues, row_blocks, softmax_dtype

USE_TRITON = True  # where it is installed and agrees; benchmarks look at the other way too
TRITON_DEVICES = ("cuda",)
WEIGHT_ROWS = 8192  # of a rounded product that is added to the weight's gradient at a time


class VocabPart(Protocol):
    """This process's part of a vocabulary that is split over processes."""

    def local_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into this part, int64 [C], and whether it holds the label, bool [C]."""

    def combine(self, sums: RowSums, held: Tensor) -> RowSums:
        """Over the whole vocabulary, from those over this part."""

    def sum_hidden_gradient_(self, grad_hidden: Tensor) -> None:
        """Over the parts, in place, unless the caller does that."""


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    chunk_size: int,
) -> None:
    """Raises ``ValueError`` for what cannot be; see ``linear_logprobs``."""
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and labels {labels.dtype} {tuple(labels.shape)}; "
            "they have to be [N, H] and int64 [N]"
        )
    vocab = weight.shape[:1]
    if weight.shape[1:] != hidden.shape[1:] or (bias is not None and bias.shape != vocab):
        shapes = [None if x is None else tuple(x.shape) for x in (weight, bias)]
        raise ValueError(
            f"weight and bias are {shapes}; they have to be [V, {hidden.shape[1]}] and [V]"
        )
    if temperature <= 0 or chunk_size < 1:
        raise ValueError(
            f"temperature is {temperature} and chunk_size {chunk_size}; both have to be positive"
        )


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _load_triton() -> RowFunctions:
    from easyrl.kernels.logprobs import triton_logprob

    return triton_logprob


@cache  # the verdict, and the warning, once in a process
def _triton_or_torch(device: torch.device, dtype: torch.dtype, vocab: int) -> RowFunctions:
    return checked(_load_triton, device, dtype, vocab)


def _row_wise(logits: Tensor) -> RowFunctions:
    """What computes along the rows of these logits."""
    if (
        not USE_TRITON
        or logits.device.type not in TRITON_DEVICES
        or logits.dtype == torch.float64
        or not _triton_is_installed()
    ):
        return vocab_softmax
    return _triton_or_torch(logits.device, logits.dtype, logits.shape[1])


class ChunkedHead:
    """One walk over N positions. The logits of all chunks are written into the same memory."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        part: VocabPart | None,
    ) -> None:
        self._hidden, self._weight, self._bias, self._labels = hidden, weight, bias, labels
        self._temperature, self._chunk_size, self._part = temperature, chunk_size, part
        self._logits = hidden.new_empty(min(chunk_size, hidden.shape[0]), weight.shape[0])

    def chunks(self) -> Iterator[slice]:
        num_tokens = self._hidden.shape[0]
        for start in range(0, num_tokens, self._chunk_size):
            yield slice(start, min(start + self._chunk_size, num_tokens))

    def logits(self, rows: slice) -> Tensor:
        """[C, V] before temperature, in the inputs' dtype; overwrites the last chunk's."""
        logits = self._logits[: rows.stop - rows.start]
        if self._bias is None:
            return torch.mm(self._hidden[rows], self._weight.t(), out=logits)
        return torch.addmm(self._bias, self._hidden[rows], self._weight.t(), out=logits)

    def values(self, logits: Tensor, rows: slice) -> RowValues:
        labels = self._labels[rows]
        row_sums = _row_wise(logits).row_sums
        if self._part is None:
            return RowValues.of(row_sums(logits, labels, self._temperature))
        labels, held = self._part.local_labels(labels)
        return RowValues.of(self._part.combine(row_sums(logits, labels, self._temperature), held))

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
        if self._part is not None:
            labels, held = self._part.local_labels(labels)
            grad_label = grad_logprobs.where(held, grad_logprobs.new_zeros(()))
        _row_wise(logits).softmax_gradient_(
            logits,
            labels,
            logsumexp,
            entropy,
            grad_logprobs,
            grad_label,
            grad_entropy,
            self._temperature,
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
        needed: tuple[bool, bool, bool],
        part: VocabPart | None,
    ) -> None:
        dtype = softmax_dtype(hidden.dtype)
        self._inputs, self._part = (hidden, weight), part
        self._dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """Those of positions ``rows``, from the gradient in their logits [C, V]."""
        hidden, weight = self._inputs
        if self.hidden is not None:
            part = torch.mm(grad_logits, weight, out=self.hidden[rows])
            if self._part is not None:
                self._part.sum_hidden_gradient_(part)
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
