"""The row-wise half of a chunk on a GPU: ``vocab_softmax``'s two functions as Triton kernels.

A program takes one position. ``row_sums`` reads its row once and keeps running sums (online
softmax); ``softmax_gradient_`` reads it once more and writes the gradient over it. In plain torch
each of these is about five passes over memory. The matrix products stay torch's.

Written here rather than taken from Liger Kernel 0.8: its fused linear cross-entropy folds one
loss's gradient into its kernel and gives no entropy; its fused GRPO and PPO losses fix the
objective. Here the gradients of log-probability and entropy are arguments, for any objective.

Shape legend: C positions of a chunk, V vocabulary held here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from easyrl.kernels.logprobs.vocab_softmax import RowSums

BLOCK = 4096  # entries of a row per step
NUM_WARPS = 8


def row_sums(logits: Tensor, labels: Tensor, temperature: float) -> RowSums:
    """As ``vocab_softmax.row_sums``, for float16, bfloat16 and float32 logits [C, V].

    A label outside [0, V) gives NaN for its logit.
    """
    sums = logits.new_empty((4, logits.shape[0]), dtype=torch.float32)
    if logits.shape[0] > 0:
        _row_sums[(logits.shape[0],)](
            logits,
            labels,
            sums,
            logits.shape[1],
            logits.stride(0),
            sums.stride(0),
            1.0 / temperature,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return RowSums(*sums.unbind())


def softmax_gradient_(
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_label: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
) -> None:
    """As ``vocab_softmax.softmax_gradient_``, in place, rounded once."""
    if logits.shape[0] == 0:
        return
    has_entropy = grad_entropy is not None
    used = grad_logprobs if grad_entropy is None else grad_entropy  # any pointer will do
    _softmax_gradient[(logits.shape[0],)](
        logits,
        labels,
        logsumexp.contiguous(),
        entropy.contiguous(),
        grad_logprobs.float().contiguous(),
        grad_label.float().contiguous(),
        used.float().contiguous(),
        logits.shape[1],
        logits.stride(0),
        1.0 / temperature,
        HAS_ENTROPY=has_entropy,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    sums_ptr,
    vocab,
    row_stride,
    sums_stride,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start_ptr = logits_ptr + row * row_stride
    # Of each of BLOCK columns of this row, combined at the end: no reduction per step.
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    exp_sum = tl.zeros((BLOCK,), tl.float32)
    weighted_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        held = index < vocab
        z = tl.load(start_ptr + index, mask=held, other=0.0).to(tl.float32) * inverse_temperature
        higher = tl.where(held, tl.maximum(maximum, z), maximum)
        # The first step has no old sums, a last step's missing entries no new ones.
        lower = tl.where(exp_sum > 0, maximum - higher, 0.0)
        scale = tl.exp(lower)
        shifted = tl.where(held, z - higher, 0.0)
        exp = tl.where(held, tl.exp(shifted), 0.0)
        weighted_sum = (weighted_sum + exp_sum * lower) * scale + exp * shifted
        exp_sum = exp_sum * scale + exp
        maximum = higher
    row_maximum = tl.max(maximum, axis=0)
    lower = tl.where(exp_sum > 0, maximum - row_maximum, 0.0)
    scale = tl.exp(lower)
    weighted_sum = (weighted_sum + exp_sum * lower) * scale
    exp_sum = exp_sum * scale
    label = tl.load(labels_ptr + row)
    inside = (label >= 0) & (label < vocab)
    label_logit = tl.load(start_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(sums_ptr + row, row_maximum)
    tl.store(sums_ptr + sums_stride + row, tl.sum(exp_sum, axis=0))
    tl.store(sums_ptr + 2 * sums_stride + row, tl.sum(weighted_sum, axis=0))
    tl.store(sums_ptr + 3 * sums_stride + row, label_logit * inverse_temperature)


@triton.jit
def _softmax_gradient(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    logsumexp_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_label_ptr,
    grad_entropy_ptr,
    vocab,
    row_stride,
    inverse_temperature,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start_ptr = logits_ptr + row * row_stride
    label = tl.load(labels_ptr + row)
    logsumexp = tl.load(logsumexp_ptr + row)
    by_logprob = tl.load(grad_logprobs_ptr + row) * inverse_temperature
    by_label = tl.load(grad_label_ptr + row) * inverse_temperature
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        by_entropy = tl.load(grad_entropy_ptr + row) * inverse_temperature
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        held = index < vocab
        z = tl.load(start_ptr + index, mask=held, other=0.0).to(tl.float32) * inverse_temperature
        logp = z - logsumexp
        factor = by_logprob
        if HAS_ENTROPY:
            factor = by_logprob + by_entropy * (logp + entropy)
        gradient = tl.where(index == label, by_label, 0.0) - tl.exp(logp) * factor
        tl.store(start_ptr + index, gradient.to(start_ptr.dtype.element_ty), mask=held)
