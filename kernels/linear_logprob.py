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


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``labels`` and entropies, both [N], of the distribution at
    ``temperature``.

    ``hidden`` [N, H], ``weight`` [V, H], ``bias`` [V], ``labels`` int64 [N] in [0, V); nats. The
    product is done in the inputs' dtype, the softmax and the results are float32 (float64 for
    float64 inputs). Both results are differentiable once in ``hidden``, ``weight`` and ``bias``; a
    weight's gradient is summed over the chunks in the softmax's precision and rounded once. Raises
    ``ValueError`` for shapes, a temperature or a chunk size that cannot be.
    """
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and labels {labels.dtype} {tuple(labels.shape)}; "
            "they have to be [N, H] and int64 [N]"
        )
    if temperature <= 0 or chunk_size < 1:
        raise ValueError(
            f"temperature is {temperature} and chunk_size {chunk_size}; both have to be positive"
        )
    return _LinearLogprobs.apply(hidden, weight, bias, labels, temperature, chunk_size)


def _chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    """[C, V] in the softmax's dtype, after temperature."""
    logits = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    logits = logits.to(_softmax_dtype(hidden))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _softmax_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _LinearLogprobs(torch.autograd.Function):
    """Saves the weight as the parameter itself: ZeRO-3 swaps its data before the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        logsumexp = hidden.new_empty(hidden.shape[0], dtype=_softmax_dtype(hidden))
        logprobs = torch.empty_like(logsumexp)
        entropy = torch.empty_like(logsumexp)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _chunk_logits(hidden[rows], weight, bias, temperature)
            torch.logsumexp(logits, dim=-1, out=logsumexp[rows])
            picked = logits.gather(1, labels[rows, None]).squeeze(1)
            torch.sub(picked, logsumexp[rows], out=logprobs[rows])
            logits.sub_(logsumexp[rows, None])
            entropy[rows] = torch.linalg.vecdot(logits.exp(), logits).neg_()
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        # With z the logits after temperature, p their softmax and y the label:
        #   d logprob / dz = onehot(y) - p        d entropy / dz = -p (log p + entropy)
        hidden, weight, bias, labels, logsumexp, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dtype = logsumexp.dtype
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if need_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            logp = _chunk_logits(hidden[rows], weight, bias, ctx.temperature)
            logp.sub_(logsumexp[rows, None])
            probs = logp.exp()
            factor = logp.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
            grad_logits = factor.add_(grad_logprobs[rows, None]).mul_(probs).neg_()
            grad_logits.scatter_add_(1, labels[rows, None], grad_logprobs[rows, None])
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_product = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_product, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                if grad_weight.dtype == hidden.dtype:
                    grad_weight.addmm_(grad_product.t(), hidden[rows])
                else:
                    grad_weight.add_(grad_product.t() @ hidden[rows])
            if grad_bias is not None:
                grad_bias.add_(grad_logits.sum(0))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
