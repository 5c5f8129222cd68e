"""Log-probability and entropy of labels under ``softmax(hidden · weightᵀ)``, without the logits.

A ``[N, V]`` matrix never exists, forward or backward: positions go through the vocabulary in
chunks. The backward pass computes each chunk's logits again from the saved log-sum-exp (4 matrix
products for 3). A loss that is a sum over tokens has its gradient in a chunk's logits as soon as
the chunk's values are known: given such a loss, it is formed in the forward pass, with 3 products.
That is the idea of the fused linear cross-entropy of Liger Kernel (Hsu et al., 2024), for any
per-token loss.

Shape legend: N positions, H hidden size, V vocabulary (in a process's part of one that is split:
the rows that the part holds), C chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.logprobs.projection import Projection, ProjectionGradients
from easyrl.kernels.logprobs.token_losses import TokenLoss, checked, differentiate
from easyrl.kernels.logprobs.vocab_shard import VocabShard
from easyrl.kernels.logprobs.vocab_softmax import softmax_dtype


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 512,
    shard: VocabShard | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, ...]:
    """Log-probabilities of ``labels`` and entropies, both [N], of the distribution at
    ``temperature``.

    ``hidden`` [N, H], ``weight`` [V, H], ``bias`` [V], ``labels`` int64 [N] in [0, V); nats. The
    product is done in the inputs' dtype, the softmax and the results are float32 (float64 for
    float64 inputs). Both results are differentiable once in ``hidden``, ``weight`` and ``bias``; a
    weight's gradient is summed over the chunks in the softmax's precision and rounded once. What is
    summed is each chunk's product, which 16-bit inputs have rounded already on a CPU, and on a GPU
    before Ampere (compute capability 8.0). Raises ``ValueError`` for shapes, a temperature or a
    chunk size that cannot be.

    With ``token_loss`` the sum of its losses (scalar) comes before the two and is differentiable in
    their place, backwards at most once. It is called once per chunk, in order; each of its losses
    may depend on its own token's values alone, since a later chunk cannot change an earlier one's
    gradient. It may ignore one of its first two arguments; losses that are NaN or infinite are
    summed like any other. Raises ``ValueError`` where it returns another shape or something that
    depends on neither of its arguments.

    With a ``soft_cap`` c the logits are ``c · tanh(x / c)`` of the product x, before temperature
    (Gemma 2, arXiv:2408.00118, section 2); the gradient goes through it.

    With a ``shard``, ``weight`` and ``bias`` are this process's rows of a vocabulary that is split.
    All other arguments have to be the same in all processes of its group, which call this together,
    forward and backward, and get the same results. A label outside the whole vocabulary gives NaN.
    """
    head = Projection(hidden, weight, bias, labels, temperature, chunk_size, shard, soft_cap)
    head.check()
    if token_loss is None:
        return _LinearLogprobs.apply(*head)
    # Gradients or not: forward cannot see it.
    return _LinearTokenLoss.apply(token_loss, torch.is_grad_enabled(), *head)


class _LinearLogprobs(torch.autograd.Function):
    """Saves the weight as the parameter itself: ZeRO-3 swaps its data before the backward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        head = Projection(*arguments)
        logsumexp = head.hidden.new_empty(len(head.hidden), dtype=softmax_dtype(head.hidden.dtype))
        logprobs, entropy = torch.empty_like(logsumexp), torch.empty_like(logsumexp)
        for rows, logits in head.chunks():
            logsumexp[rows], logprobs[rows], entropy[rows] = head.values(logits, rows)
        ctx.save_for_backward(*head[:4], logsumexp, entropy)
        ctx.set_materialize_grads(False)
        ctx.settings = head[4:]
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, logsumexp, entropy = ctx.saved_tensors
        if grad_logprobs is None:  # not used; grad_entropy may be None too
            grad_logprobs = torch.zeros_like(logsumexp)
        head = Projection(*inputs, *ctx.settings)
        gradients = ProjectionGradients(head, ctx.needs_input_grad)
        for rows, logits in head.chunks():
            by_entropy = None if grad_entropy is None else grad_entropy[rows]
            head.logit_gradient_(
                logits, rows, logsumexp[rows], entropy[rows], grad_logprobs[rows], by_entropy
            )
            gradients.add(logits, rows)
        return (*gradients.rounded(), *[None] * 5)


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token_loss: TokenLoss, grad_enabled: bool, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        needed = [grad_enabled and each for each in ctx.needs_input_grad[2:5]]
        head = Projection(*arguments)
        gradients = ProjectionGradients(head, needed)
        logprobs = head.hidden.new_empty(len(head.hidden), dtype=softmax_dtype(head.hidden.dtype))
        entropy = torch.empty_like(logprobs)
        loss_sum = logprobs.new_zeros(())
        for rows, logits in head.chunks():
            logsumexp, logp, h = head.values(logits, rows)
            logprobs[rows], entropy[rows] = logp, h
            if not any(needed):
                loss_sum += checked(token_loss(logp, h, rows), rows).sum()
                continue
            chunk_sum, (by_logprob, by_entropy) = differentiate(token_loss, (logp, h), rows)
            loss_sum += chunk_sum
            if by_logprob is None:  # not used
                by_logprob = torch.zeros_like(logp)
            head.logit_gradient_(logits, rows, logsumexp, h, by_logprob, by_entropy)
            gradients.add(logits, rows)
        ctx.mark_non_differentiable(logprobs, entropy)
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return loss_sum, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_logprobs went backward before and gave its gradient away")
        gradients, ctx.gradients = ctx.gradients, None
        if grad_sum is None:
            return (None,) * 10
        gradients.scale_(grad_sum)
        return (None, None, *gradients.rounded(), *[None] * 5)
