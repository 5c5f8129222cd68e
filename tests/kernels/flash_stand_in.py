"""A stand-in for flash attention, whose kernels need a GPU.

It computes what flash attention documents since version 2.1: within each sequence the last query
sees all keys, the one before all but the last, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from easyrl.kernels.attention.segment_layout import Paths

SCALE = 0.3


def lengths(query_starts: Tensor, key_starts: Tensor, max_query: int, max_key: int) -> Paths:
    """Paths of which a kernel only sees the lengths."""
    return Paths(torch.empty(0), (), (), query_starts, key_starts, max_query, max_key)


def causal_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, scale: float
) -> Tensor:
    """A loop over sequences, query heads in groups over the key heads: [T, Hq, D]."""
    assert paths.query_starts.dtype == paths.key_starts.dtype == torch.int32
    queries, keys = paths.query_starts.tolist(), paths.key_starts.tolist()
    assert queries[0] == keys[0] == 0
    assert (queries[-1], keys[-1]) == (query.shape[0], key.shape[0] or 0)
    group = query.shape[1] // key.shape[1]
    outputs, longest = [], (0, 0)
    for sequence in range(len(queries) - 1):
        q = query[queries[sequence] : queries[sequence + 1]]
        k = key[keys[sequence] : keys[sequence + 1]].repeat_interleave(group, dim=1)
        v = value[keys[sequence] : keys[sequence + 1]].repeat_interleave(group, dim=1)
        longest = (max(longest[0], len(q)), max(longest[1], len(k)))
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=2)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    assert longest == (paths.max_query, paths.max_key)
    return torch.cat(outputs)


def gradients_by_sequence(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    paths: Paths,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivative of ``causal_by_sequence``, written out: autograd does not reach below an
    operator."""
    queries, keys = paths.query_starts.tolist(), paths.key_starts.tolist()
    group = query.shape[1] // key.shape[1]
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    for sequence in range(len(queries) - 1):
        rows = slice(queries[sequence], queries[sequence + 1])
        columns = slice(keys[sequence], keys[sequence + 1])
        for head in range(query.shape[1]):
            q, g = query[rows, head], grad[rows, head]
            k, v = key[columns, head // group], value[columns, head // group]
            seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            weights = (q @ k.T * scale).masked_fill(~seen, -torch.inf).softmax(dim=1)
            dot = (g * output[rows, head]).sum(dim=1, keepdim=True)
            of_scores = weights * (g @ v.T - dot) * scale
            of_query[rows, head] = of_scores @ k
            of_key[columns, head // group] += of_scores.T @ q
            of_value[columns, head // group] += weights.T @ g
    return of_query, of_key, of_value


@pytest.fixture
def flash_attention_on_cpu() -> Iterator[None]:
    """PyTorch's flash attention operators, which have no CPU kernel, with a stand-in for one."""

    def forward(query, key, value, query_starts, key_starts, max_q, max_k, *args, **kwargs):
        dropout, is_causal = args[:2]
        assert dropout == 0.0 and is_causal and kwargs["window_size_right"] == 0
        paths = lengths(query_starts, key_starts, max_q, max_k)
        output = causal_by_sequence(query, key, value, paths, kwargs["scale"])
        logsumexp = torch.zeros(query.shape[1], query.shape[0])
        return output, logsumexp, torch.zeros(2), torch.zeros(0), torch.zeros(0)

    def backward(grad, query, key, value, output, logsumexp, *args, **kwargs):
        query_starts, key_starts, max_q, max_k, dropout, is_causal = args[:6]
        assert dropout == 0.0 and is_causal
        paths = lengths(query_starts, key_starts, max_q, max_k)
        return gradients_by_sequence(grad, query, key, value, output, paths, kwargs["scale"])

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield
