"""Log-probability and entropy of labels under ``softmax(hidden · weightᵀ)``, without the logits.

A ``[N, V]`` matrix never exists, forward or backward: positions go through the vocabulary in
chunks, and the backward pass computes each chunk's logits again from the saved log-sum-exp (4
matrix products for 3).

Shape legend: N positions, H hidden size, V vocabulary, C chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.logprobs.chunked_head import ChunkedHead, HeadGradients, Settings
from easyrl.kernels.logprobs.vocab_shard import VocabShard
from easyrl.kernels.logprobs.vocab_softmax import softmax_dtype


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 512,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``labels`` and entropies, both [N], of the distribution at
    ``temperature``.

    ``hidden`` [N, H], ``weight`` [V, H], ``bias`` [V], ``labels`` int64 [N] in [0, V); nats. The
    product is done in the inputs' dtype, the softmax and the results are float32 (float64 for
    float64 inputs). Both results are differentiable once in ``hidden``, ``weight`` and ``bias``; a
    weight's gradient is summed over the chunks in the softmax's precision and rounded once. What is
    summed is each chunk's product, which 16-bit inputs have rounded already on a CPU, and on a GPU
    before Ampere (compute capability 8.0). Raises ``ValueError`` for shapes, a temperature or a
    chunk size that cannot be.

    With a ``shard``, ``weight`` and ``bias`` are this process's rows of a vocabulary that is split.
    All other arguments have to be the same in all processes of its group, which call this together,
    forward and backward, and get the same results. A label outside the whole vocabulary gives NaN.
    """
    settings = Settings(temperature, chunk_size, shard)
    settings.check(hidden, weight, bias, labels)
    return _LinearLogprobs.apply(hidden, weight, bias, labels, settings)


class _LinearLogprobs(torch.autograd.Function):
    """Saves the weight as the parameter itself: ZeRO-3 swaps its data before the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: Settings,
    ) -> tuple[Tensor, Tensor]:
        head = ChunkedHead(hidden, weight, bias, labels, settings)
        logsumexp = hidden.new_empty(hidden.shape[0], dtype=softmax_dtype(hidden.dtype))
        logprobs, entropy = torch.empty_like(logsumexp), torch.empty_like(logsumexp)
        for rows, logits in head.chunks():
            logsumexp[rows], logprobs[rows], entropy[rows] = head.values(logits, rows)
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        hidden, weight, bias, labels, logsumexp, entropy = ctx.saved_tensors
        if grad_logprobs is None:  # not used; grad_entropy may be None too
            grad_logprobs = torch.zeros_like(logsumexp)
        head = ChunkedHead(hidden, weight, bias, labels, ctx.settings)
        needed = ctx.needs_input_grad[:3]
        gradients = HeadGradients(hidden, weight, bias, needed, ctx.settings.shard)
        for rows, logits in head.chunks():
            head.gradient_(
                logits,
                rows,
                logsumexp[rows],
                entropy[rows],
                grad_logprobs[rows],
                None if grad_entropy is None else grad_entropy[rows],
            )
            gradients.add(rows, logits)
        return (*gradients.rounded(), None, None)
