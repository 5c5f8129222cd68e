"""Divergence of two distributions along the rows of two chunks of logits, and its gradient.

As in ``vocab_softmax.py`` a few rows are read, and overwritten, at a time. Plain torch on every
device; a GPU would gain from a kernel as ``triton_logprob.py`` has one for the softmax.

Shape legend: C positions of a chunk, V vocabulary; p is the student's distribution, q the
teacher's, both at the temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from easyrl.kernels.logprobs.vocab_softmax import row_blocks


def reverse_kl(
    logits: Tensor,
    teacher_logits: Tensor,
    logsumexp: Tensor,
    teacher_logsumexp: Tensor,
    temperature: float,
) -> Tensor:
    """[C] ``KL(p || q) = sum_v p (log p - log q)``, nats; all arguments are only read.

    Both logits are [C, V] before temperature, both log-sum-exps [C] after it. The differences of
    log-probabilities are taken before the sum, so that equal distributions are no distance apart.
    """
    divergence = torch.empty_like(logsumexp)
    for rows in row_blocks(logits):
        logp = _logprobs(logits[rows], logsumexp[rows], temperature)
        difference = _logprobs(teacher_logits[rows], teacher_logsumexp[rows], temperature)
        torch.sub(logp, difference, out=difference)
        divergence[rows] = torch.linalg.vecdot(logp.exp_(), difference)
    return divergence


def reverse_kl_gradient_(
    logits: Tensor,
    teacher_logits: Tensor,
    logsumexp: Tensor,
    teacher_logsumexp: Tensor,
    divergence: Tensor,
    grad_divergence: Tensor,
    temperature: float,
    *,
    into_teacher: bool,
) -> None:
    """Overwrites ``logits``, or ``teacher_logits``, by the gradient of a loss in ``logits``.

    ``d KL / dz = p (log p - log q - KL)``, z the logits after temperature. ``divergence`` is of
    ``reverse_kl``, ``grad_divergence`` the loss's gradient in it; both are [C].
    """
    factor = grad_divergence.div(temperature)
    for rows in row_blocks(logits):
        logp = _logprobs(logits[rows], logsumexp[rows], temperature)
        gradient = _logprobs(teacher_logits[rows], teacher_logsumexp[rows], temperature)
        torch.sub(logp, gradient, out=gradient)
        gradient.sub_(divergence[rows, None]).mul_(logp.exp_()).mul_(factor[rows, None])
        (teacher_logits if into_teacher else logits)[rows] = gradient  # the only rounding


def _logprobs(logits: Tensor, logsumexp: Tensor, temperature: float) -> Tensor:
    """A new tensor, in the softmax's dtype."""
    scaled = logits.to(logsumexp.dtype, copy=True)
    if temperature != 1.0:
        scaled.div_(temperature)
    return scaled.sub_(logsumexp[:, None])
