"""Attention over one block of keys, with what is needed to merge it with attention over others.

The forward also returns the log-sum-exp of each query's scores. The backward takes an output and a
log-sum-exp as arguments: given those of attention over *all* of a query's keys, it returns this
block's share of the gradients, exactly (the scores' softmax is formed from the log-sum-exp, and the
row term of Dao et al. 2022, "FlashAttention", appendix B.4, is the inner product of output and its
gradient). PyTorch's own fused kernels do the work, behind one pair of functions.

Shape legend: B batch, H heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten

_ROWS = 256  # queries at a time where no fused kernel is known


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype log-sum-exps are returned and sums over blocks should be held."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, D] in the inputs' dtype and log-sum-exp [B, H, Q] in ``softmax_dtype``.

    ``query`` [B, H, Q, D], ``key`` and ``value`` [B, H, K, D], with any strides but that of the
    last dimension, which is 1; 0 is allowed, which repeats heads without a copy. ``causal`` needs
    Q = K.
    """
    match _kernel(query):
        case "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, scale=scale
            )
        case "flash":
            output, logsumexp, *_ = _aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, causal, False, scale=scale
            )
            return output, logsumexp
        case "efficient":
            output, logsumexp, *_ = _aten._scaled_dot_product_efficient_attention(
                query, key, value, None, True, 0.0, causal, scale=scale
            )
            return output, logsumexp[..., : query.shape[2]]  # it comes padded
        case _:
            return _forward_in_rows(query, key, value, causal, scale)


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in ``query``, ``key`` and ``value``, in their shapes.

    ``output`` and ``grad_output`` are as ``query``; ``output`` and ``logsumexp`` may be those of
    attention over further keys.
    """
    match _kernel(query):
        case "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_output, query, key, value, output, logsumexp, 0.0, causal, scale=scale
            )
        case "flash":
            # Cumulative lengths and random state belong to ragged batches and dropout.
            unused = torch.empty(0, dtype=torch.uint64, device=query.device)
            return _aten._scaled_dot_product_flash_attention_backward(
                grad_output,
                query,
                key,
                value,
                output,
                logsumexp.contiguous(),
                None,
                None,
                query.shape[2],
                key.shape[2],
                0.0,
                causal,
                torch.zeros(2, dtype=torch.uint64, device=query.device),
                unused,
                scale=scale,
            )
        case "efficient":
            # The kernel reads whole tiles of 32 queries; infinity makes the added ones weigh 0.
            padded = F.pad(logsumexp, (0, -query.shape[2] % 32), value=float("inf"))
            random = torch.zeros((), dtype=torch.int64, device=query.device)
            grads = _aten._scaled_dot_product_efficient_attention_backward(
                grad_output,
                query,
                key,
                value,
                None,
                output,
                padded.contiguous(),
                random,
                random,
                0.0,
                [True, True, True, False],
                causal,
                scale=scale,
            )
            return grads[0], grads[1], grads[2]
        case _:
            return _backward_in_rows(
                grad_output, query, key, value, output, logsumexp, causal, scale
            )


def _kernel(query: Tensor) -> str:
    """Which of the fused kernels takes these inputs; ``"rows"`` for none."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu":
        return "cpu"
    if query.device.type == "cuda":
        capability = torch.cuda.get_device_capability(query.device)
        if half and capability >= (8, 0) and query.shape[3] % 8 == 0 and query.shape[3] <= 256:
            return "flash"
        if query.dtype == torch.float32 and query.shape[3] % 4 == 0:
            return "efficient"
    return "rows"


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[B·H, rows, keys]. ``baddbmm``, because activation checkpointing may keep ``bmm``'s
    results, and these are quadratic."""
    return torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scale)


def _rows(
    query: Tensor, key: Tensor, causal: bool, scale: float, start: int
) -> tuple[Tensor, Tensor]:
    """Queries [B·H, R, D] from ``start`` and their masked scores over the keys they may see."""
    rows = query[:, start : start + _ROWS]
    keys = key[:, : start + rows.shape[1]] if causal else key
    scores = _scores(rows, keys, scale)
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device)
        scores.masked_fill_(hidden.triu_(1 + start), float("-inf"))
    return rows, scores


def _flat(x: Tensor) -> Tensor:
    """[B·H, …] in the softmax's dtype."""
    return x.flatten(0, 1).to(softmax_dtype(x.dtype))


def _forward_in_rows(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = _flat(query), _flat(key), _flat(value)
    output, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:2])
    for start in range(0, q.shape[1], _ROWS):
        _, scores = _rows(q, k, causal, scale, start)
        here = slice(start, start + scores.shape[1])
        torch.logsumexp(scores, 2, out=logsumexp[:, here])
        weights = scores.sub_(logsumexp[:, here, None]).exp_()
        torch.baddbmm(
            output[:, here], weights, v[:, : scores.shape[2]], beta=0, out=output[:, here]
        )
    return output.to(query.dtype).view(query.shape), logsumexp.view(query.shape[:3])


def _backward_in_rows(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, o = (_flat(x) for x in (grad_output, query, key, value, output))
    lse = _flat(logsumexp)
    row_term = (grad * o).sum(2, keepdim=True)
    grad_query, grad_key, grad_value = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[1], _ROWS):
        rows, scores = _rows(q, k, causal, scale, start)
        here, keys = slice(start, start + scores.shape[1]), slice(0, scores.shape[2])
        weights = scores.sub_(lse[:, here, None]).exp_()
        grad_value[:, keys].baddbmm_(weights.mT, grad[:, here])
        grad_scores = _scores(grad[:, here], v[:, keys], 1.0).sub_(row_term[:, here]).mul_(weights)
        grad_query[:, here] = torch.baddbmm(rows, grad_scores, k[:, keys], beta=0, alpha=scale)
        grad_key[:, keys].baddbmm_(grad_scores.mT, rows, alpha=scale)
    return (
        grad_query.to(query.dtype).view(query.shape),
        grad_key.to(key.dtype).view(key.shape),
        grad_value.to(value.dtype).view(value.shape),
    )
