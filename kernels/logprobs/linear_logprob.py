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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.logprobs.row_functions import row_functions
from easyrl.kernels.logprobs.vocab_shard import VocabShard
from easyrl.kernels.logprobs.vocab_softmax import RowValues, row_blocks, softmax_dtype

WEIGHT_ROWS = 8192  # of a rounded product that is added to the weight's gradient at a time

# (log-probabilities [C], entropies [C], rows of the N positions) -> losses [C], differentiable in
# the first two.
TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]


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

    With a ``shard``, ``weight`` and ``bias`` are this process's rows of a vocabulary that is split.
    All other arguments have to be the same in all processes of its group, which call this together,
    forward and backward, and get the same results. A label outside the whole vocabulary gives NaN.
    """
    head = _Head(hidden, weight, bias, labels, temperature, chunk_size, shard)
    head.check()
    if token_loss is None:
        return _LinearLogprobs.apply(*head)
    # Gradients or not: forward cannot see it.
    return _LinearTokenLoss.apply(token_loss, torch.is_grad_enabled(), *head)


class _Head(NamedTuple):
    """The projection and its positions, a chunk at a time."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    temperature: float
    chunk_size: int
    shard: VocabShard | None

    def check(self) -> None:
        hidden, weight, bias, labels, temperature, chunk_size, shard = self
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
            yield rows, logits

    def values(self, logits: Tensor, rows: slice) -> RowValues:
        labels, held = self.labels[rows], None
        if self.shard is not None:
            labels, held = self.shard.local_labels(labels)
        sums = row_functions(logits).row_sums(logits, labels, self.temperature)
        if self.shard is not None and held is not None:
            sums = self.shard.combine(sums, held)
        return RowValues.of(sums)


class _Gradients:
    """Sums over the chunks; those of weight and bias in the softmax's precision, rounded once.

    A chunk's part of the weight's may be rounded before; see ``_add_product_``.
    """

    def __init__(self, head: _Head, needed: Sequence[bool]) -> None:
        hidden, weight, bias, *_ = head
        dtype = softmax_dtype(hidden.dtype)
        self._head = head
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add(
        self,
        logits: Tensor,
        rows: slice,
        logsumexp: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        """Those of positions ``rows``; overwrites their ``logits`` by the gradient in them."""
        hidden, weight, _, all_labels, temperature, _, shard = self._head
        labels, grad_label = all_labels[rows], grad_logprobs
        if shard is not None:
            labels, held = shard.local_labels(labels)
            grad_label = grad_logprobs.where(held, grad_logprobs.new_zeros(()))
        row_functions(logits).softmax_gradient_(
            logits, labels, logsumexp, entropy, grad_logprobs, grad_label, grad_entropy, temperature
        )
        if self._hidden is not None:
            grad_hidden = torch.mm(logits, weight, out=self._hidden[rows])
            if shard is not None:
                shard.sum_hidden_gradient_(grad_hidden)
        if self._weight is not None:
            _add_product_(self._weight, logits, hidden[rows])
        if self._bias is not None:
            for block in row_blocks(logits):
                self._bias.add_(logits[block].sum(0, dtype=self._bias.dtype))

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


class _LinearLogprobs(torch.autograd.Function):
    """Saves the weight as the parameter itself: ZeRO-3 swaps its data before the backward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        head = _Head(*arguments)
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
        head = _Head(*inputs, *ctx.settings)
        gradients = _Gradients(head, ctx.needs_input_grad)
        for rows, logits in head.chunks():
            by_entropy = None if grad_entropy is None else grad_entropy[rows]
            gradients.add(
                logits, rows, logsumexp[rows], entropy[rows], grad_logprobs[rows], by_entropy
            )
        return (*gradients.rounded(), None, None, None, None)


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token_loss: TokenLoss, grad_enabled: bool, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        needed = [grad_enabled and each for each in ctx.needs_input_grad[2:5]]
        head = _Head(*arguments)
        gradients = _Gradients(head, needed)
        logprobs = head.hidden.new_empty(len(head.hidden), dtype=softmax_dtype(head.hidden.dtype))
        entropy = torch.empty_like(logprobs)
        loss_sum = logprobs.new_zeros(())
        for rows, logits in head.chunks():
            logsumexp, logp, h = head.values(logits, rows)
            logprobs[rows], entropy[rows] = logp, h
            if not any(needed):
                loss_sum += _checked(token_loss(logp, h, rows), rows).sum()
                continue
            chunk_sum, by_logprob, by_entropy = _differentiate(token_loss, logp, h, rows)
            loss_sum += chunk_sum
            gradients.add(logits, rows, logsumexp, h, by_logprob, by_entropy)
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
            return (None,) * 9
        gradients.scale_(grad_sum)
        return (None, None, *gradients.rounded(), None, None, None, None)


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
