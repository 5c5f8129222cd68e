"""Losses of single tokens, which a projection turns into a gradient as soon as it has their values.

Shape legend: N positions, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# (log-probabilities [C], entropies [C], rows of the N positions) -> losses [C], differentiable in
# the first two.
TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]
# The same with the divergences [C] from another distribution behind, differentiable in these too.
DivergenceLoss = Callable[[Tensor, Tensor, slice, Tensor], Tensor]


class RowLoss(Protocol):
    """Either of the two: without ``divergence`` [C] a ``TokenLoss``."""

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        rows: slice,
        divergence: Tensor | None = None,
        /,
    ) -> Tensor: ...


def differentiate(
    token_loss: Callable[..., Tensor], values: Sequence[Tensor], rows: slice
) -> tuple[Tensor, list[Tensor | None]]:
    """A chunk's loss sum and its gradients in each of ``values``, which are [C].

    The arguments of ``token_loss`` are the first two, ``rows``, and the rest. A gradient is None
    where the loss does not use the value. Raises ``ValueError`` for losses of another shape, or
    that depend on no value.
    """
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in values]
        losses = checked(token_loss(*leaves[:2], rows, *leaves[2:]), rows)
        if not losses.requires_grad:
            raise ValueError("token_loss returned losses that depend on none of its arguments")
        loss_sum = losses.sum()
        gradients = torch.autograd.grad(loss_sum, leaves, allow_unused=True)
    return loss_sum.detach(), list(gradients)


def checked(losses: Tensor, rows: slice) -> Tensor:
    """``losses`` if they are one for each of ``rows``. Raises ``ValueError``."""
    shape = (rows.stop - rows.start,)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != shape:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"token_loss returned {got} for a chunk of {shape[0]} positions")
    return losses
