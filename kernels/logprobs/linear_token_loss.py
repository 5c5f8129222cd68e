"""The sum of per-token losses of log-probabilities and entropies, without the logits.

A loss that is a sum over tokens has its gradient in a chunk's logits as soon as the chunk's values
are known. So it is formed in the forward pass, while the logits are there: 3 matrix products, as
with whole logits, where ``linear_logprobs`` needs 4. The idea is that of the fused linear
cross-entropy of Liger Kernel (Hsu et al., 2024), for any per-token loss.

Shape legend: N positions, H hidden size, V vocabulary, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.logprobs.chunked_head import ChunkedHead, HeadGradients, Settings
from easyrl.kernels.logprobs.vocab_shard import VocabShard
from easyrl.kernels.logprobs.vocab_softmax import softmax_dtype

# (log-probabilities [C], entropies [C], rows of the N positions) -> losses [C], differentiable in
# the first two.
TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 512,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of ``token_loss`` over the N positions, and what ``linear_logprobs`` gives, detached.

    ``token_loss`` is called once per chunk, in order; each of its losses may depend on its own
    token's values alone, since a later chunk cannot change an earlier one's gradient. It may ignore
    one of its first two arguments. The other arguments are those of ``linear_logprobs``.

    Returns the loss sum (scalar, differentiable once in ``hidden``, ``weight`` and ``bias``, and
    backwards at most once), log-probabilities [N] and entropies [N]; all float32 (float64 for
    float64 inputs). Losses that are NaN or infinite are summed like any other. Raises
    ``ValueError`` as ``linear_logprobs`` does, and where ``token_loss`` returns another shape or
    something that depends on neither of its arguments.
    """
    settings = Settings(temperature, chunk_size, shard)
    settings.check(hidden, weight, bias, labels)
    grad_enabled = torch.is_grad_enabled()  # forward cannot see it
    return _LinearTokenLoss.apply(hidden, weight, bias, labels, token_loss, settings, grad_enabled)


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_loss: TokenLoss,
        settings: Settings,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needed = [grad_enabled and each for each in ctx.needs_input_grad[:3]]
        head = ChunkedHead(hidden, weight, bias, labels, settings)
        gradients = HeadGradients(hidden, weight, bias, needed, settings.shard)
        logprobs = hidden.new_empty(hidden.shape[0], dtype=softmax_dtype(hidden.dtype))
        entropy = torch.empty_like(logprobs)
        loss_sum = logprobs.new_zeros(())
        for rows, logits in head.chunks():
            values = head.values(logits, rows)
            logprobs[rows], entropy[rows] = values.logprobs, values.entropy
            if not any(needed):
                losses = token_loss(values.logprobs, values.entropy, rows)
                loss_sum += _checked(losses, rows).sum()
                continue
            chunk_sum, grad_logprobs, grad_entropy = _differentiate(
                token_loss, values.logprobs, values.entropy, rows
            )
            loss_sum += chunk_sum
            head.gradient_(
                logits, rows, values.logsumexp, values.entropy, grad_logprobs, grad_entropy
            )
            gradients.add(rows, logits)
        ctx.mark_non_differentiable(logprobs, entropy)
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return loss_sum, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_token_loss went backward before and gave its gradient away")
        gradients, ctx.gradients = ctx.gradients, None
        if grad_sum is None:
            return (None,) * 7
        gradients.scale_(grad_sum)
        return (*gradients.rounded(), None, None, None, None)


def _differentiate(
    token_loss: TokenLoss, logprobs: Tensor, entropy: Tensor, rows: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A chunk's loss sum and its gradients in the log-probabilities and the entropies.

    That in the entropies is None where the loss does not use them.
    """
    with torch.enable_grad():
        leaves = (logprobs.detach().requires_grad_(), entropy.detach().requires_grad_())
        losses = _checked(token_loss(*leaves, rows), rows)
        if not losses.requires_grad:
            raise ValueError("token_loss returned losses that depend on none of its arguments")
        loss_sum = losses.sum()
        grad_logprobs, grad_entropy = torch.autograd.grad(loss_sum, leaves, allow_unused=True)
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(logprobs)
    return loss_sum.detach(), grad_logprobs, grad_entropy


def _checked(losses: Tensor, rows: slice) -> Tensor:
    shape = (rows.stop - rows.start,)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != shape:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"token_loss returned {got} for a chunk of {shape[0]} positions")
    return losses
