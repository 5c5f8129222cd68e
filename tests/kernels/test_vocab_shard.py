"""A vocabulary split over two processes against the whole one in fp64."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.kernels.logprobs.vocab_shard import VocabShard
from tests.kernels.test_linear_logprob import NUM_TOKENS, VOCAB, inputs, whole

SPLIT = 100  # rows of the first process; the second has the other 201


def coefficients() -> Tensor:
    return torch.randn(
        2, NUM_TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )


def losses(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    by_logprob, by_entropy = coefficients()[:, rows]
    return by_logprob * logprobs.exp() + by_entropy * entropy**2


def check_all(rank: int, store: str) -> None:
    """In each of two processes; anything wrong raises."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for function, with_bias, temperature, chunk_size in itertools.product(
            ("logprobs", "token_loss"), (False, True), (1.0, 0.7), (10, 64)
        ):
            check_against_whole(rank, function, with_bias, temperature, chunk_size)
        check_hidden_gradient_left_to_the_caller(rank)
        check_far_maxima(rank)
        check_unheld_label(rank)
    finally:
        dist.destroy_process_group()


def shard_of(rank: int, reduce_hidden: bool = True) -> tuple[VocabShard, slice]:
    start, stop = ((0, SPLIT), (SPLIT, VOCAB))[rank]
    group = dist.group.WORLD
    assert group is not None
    return VocabShard(group, start, stop - start, reduce_hidden), slice(start, stop)


def check_against_whole(
    rank: int, function: str, with_bias: bool, temperature: float, chunk_size: int
) -> None:
    hidden, weight, bias, labels = inputs()
    shard, mine = shard_of(rank)
    part = weight.detach()[mine].clone().requires_grad_()
    bias_part = bias.detach()[mine].clone().requires_grad_() if with_bias else None
    settings = {"bias": bias_part, "temperature": temperature, "chunk_size": chunk_size}
    if function == "logprobs":
        logprobs, entropy = linear_logprobs(hidden, part, labels, shard=shard, **settings)
        loss = losses(logprobs, entropy, slice(None)).sum()
    else:
        loss, logprobs, entropy = linear_logprobs(
            hidden, part, labels, losses, shard=shard, **settings
        )
    leaves = [hidden, part, *([bias_part] if bias_part is not None else [])]
    gradients = torch.autograd.grad(loss, leaves)

    used_bias = bias if with_bias else None
    expected = whole(hidden, weight, labels, used_bias, temperature)
    expected_loss = losses(*expected, slice(None)).sum()
    whole_leaves = [hidden, weight, *([bias] if with_bias else [])]
    whole_gradients = torch.autograd.grad(expected_loss, whole_leaves)
    expected_gradients = [whole_gradients[0], *(g[mine] for g in whole_gradients[1:])]
    # fp64 sums over 301 entries and 37 positions of gradients up to 100.
    for got, right in zip(
        (logprobs, entropy, loss, *gradients),
        (*expected, expected_loss, *expected_gradients),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-11)


def check_hidden_gradient_left_to_the_caller(rank: int) -> None:
    hidden, weight, _, labels = inputs()
    gradients = {}
    for reduce_hidden in (True, False):
        shard, mine = shard_of(rank, reduce_hidden)
        loss, *_ = linear_logprobs(
            hidden, weight.detach()[mine], labels, losses, shard=shard, chunk_size=16
        )
        (gradients[reduce_hidden],) = torch.autograd.grad(loss, hidden)
    assert not torch.allclose(gradients[True], gradients[False], rtol=1e-3)
    dist.all_reduce(gradients[False])
    torch.testing.assert_close(gradients[True], gradients[False], rtol=1e-12, atol=1e-12)


def check_far_maxima(rank: int) -> None:
    """One part's logits lie 2,000 nats under the other's: nothing overflows or is lost."""
    hidden, weight, bias, labels = inputs()
    bias = bias.detach()
    bias[:SPLIT] -= 2000
    shard, mine = shard_of(rank)
    got = linear_logprobs(
        hidden, weight.detach()[mine], labels, shard=shard, bias=bias[mine], chunk_size=16
    )
    for first, second in zip(got, whole(hidden, weight, labels, bias, 1.0), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-11)


def check_unheld_label(rank: int) -> None:
    hidden, weight, _, labels = inputs()
    labels[3] = VOCAB
    shard, mine = shard_of(rank)
    logprobs, entropy = linear_logprobs(hidden, weight[mine], labels, shard=shard)
    assert logprobs.isnan().nonzero().tolist() == [[3]] and entropy.isfinite().all()


def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(check_all, args=(str(tmp_path / "store"),), nprocs=2)


def test_weight_of_another_size_is_refused() -> None:
    hidden, weight, _, labels = inputs()
    shard = VocabShard(None, 0, SPLIT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="301 rows"):
        linear_logprobs(hidden, weight, labels, shard=shard)
    with pytest.raises(ValueError, match="301 rows"):
        linear_logprobs(hidden, weight, labels, losses, shard=shard)
