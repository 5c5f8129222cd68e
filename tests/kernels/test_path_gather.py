"""Gathered keys and values: their gradients, and that nothing of their length outlives a pass."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from easyrl.kernels.attention.path_gather import attend_over_paths, gather_tokens
from easyrl.kernels.attention.segment_layout import Paths
from tests.kernels.memory_recorder import PeakMemory
from tests.kernels.path_operator import (
    HEADS,
    INDEX,
    SIZE,
    TOKENS,
    Calls,
    fused,
    inputs,
    keep_attention,
    results,
)

# The queries are the row's, whatever path they are on.
LENGTHS = (torch.tensor([0, TOKENS]), torch.tensor([0, len(INDEX)]))
ALL_PATHS = Paths(INDEX, (TOKENS,), (len(INDEX),), *LENGTHS, TOKENS, len(INDEX))


def over_paths(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_over_paths(lambda q, k, v, paths: fused(q, k, v), query, key, value, [ALL_PATHS])


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Like a layer: what the attention is given is computed before it."""
    return over_paths(query.sin(), key.sin(), value.sin())


def by_indexing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query.sin(), key.sin()[INDEX])
    return torch.einsum("hqk,khd->qhd", scores.softmax(2), value.sin()[INDEX])


def again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(plain, query, key, value, use_reentrant=False, preserve_rng_state=False)


def selectively(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(
        plain,
        query,
        key,
        value,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, keep_attention),
    )


FORMS = [plain, again, selectively]


@pytest.mark.parametrize("form", FORMS)
def test_is_attention_over_indexed_keys(form: Callable[..., Tensor]) -> None:
    tensors = inputs()
    for got, expected in zip(results(form, tensors), results(by_indexing, tensors), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("form", "times"), zip(FORMS, (1, 2, 1), strict=True))
def test_attention_itself_is_not_computed_again(form: Callable[..., Tensor], times: int) -> None:
    """Twice where all of a layer is."""
    with Calls() as calls:
        results(form, inputs())
    assert calls.number == times


def saved_elements(form: Callable[..., Tensor]) -> list[int]:
    """Of the floating point tensors that autograd is given to keep."""
    sizes: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        form(*inputs())
    return sizes


def test_what_is_saved() -> None:
    """Key, value, query, output, log-sum-exp; as merely gathered it would be far more."""

    def gathered(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fused(query, gather_tokens(key, INDEX), gather_tokens(value, INDEX))

    per_token = HEADS * SIZE
    expected = [TOKENS * per_token] * 4 + [TOKENS * HEADS]
    assert sorted(saved_elements(over_paths)) == sorted(expected)
    assert max(saved_elements(gathered)) == len(INDEX) * per_token


@pytest.mark.parametrize(
    ("form", "tensors_of_tokens"),
    # sines and output; the output, the caller's; that and what the operator returned
    zip(FORMS, (4, 1, 2), strict=True),
)
def test_what_is_alive_after_the_forward_pass(
    form: Callable[..., Tensor], tensors_of_tokens: int
) -> None:
    """Whoever holds it. Activation checkpointing can drop all that is kept here."""
    given = inputs()
    with PeakMemory(*given, INDEX) as memory:
        output = form(*given)
        gc.collect()
        alive = memory.alive
    assert memory.peak > len(INDEX) * HEADS * SIZE
    assert alive <= tensors_of_tokens * TOKENS * HEADS * SIZE + TOKENS * HEADS
    assert output.requires_grad


def test_gradients_are_taken_twice_where_the_graph_is_retained() -> None:
    tensors = inputs()
    output = plain(*tensors).sum()
    first = torch.autograd.grad(output, tensors, retain_graph=True)
    for got, expected in zip(torch.autograd.grad(output, tensors), first, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    tensors = inputs()
    expected = plain(*tensors)
    with mode():
        output = plain(*tensors)
    assert not output.requires_grad and torch.equal(output, expected)
