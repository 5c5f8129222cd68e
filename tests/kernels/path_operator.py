"""A fused attention operator to gather keys for, with what its tests share.

Not a test module: pytest imports those under a name of their own beside the one that other modules
import them by, and to register an operator's name again frees what the first registration calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

TOKENS, HEADS, SIZE = 40, 2, 8
# A prompt of 30 tokens on 20 paths: K is 15 times T.
INDEX = torch.cat([torch.arange(30)] * 20)


@torch.library.custom_op("path_gather_test::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Attention of all queries over all keys: output and log-sum-exp, as fused operators give."""
    scores = torch.einsum("qhd,khd->hqk", query, key)
    return [torch.einsum("hqk,khd->qhd", scores.softmax(2), value), scores.logsumexp(2)]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, ...]:
    query, key, value, output, logsumexp = ctx.saved_tensors
    grad = grads[0]
    weights = (torch.einsum("qhd,khd->hqk", query, key) - logsumexp[:, :, None]).exp()
    dot = (grad * output).sum(2).T[:, :, None]
    of_scores = weights * (torch.einsum("qhd,khd->hqk", grad, value) - dot)
    return (
        torch.einsum("hqk,khd->qhd", of_scores, key),
        torch.einsum("hqk,qhd->khd", of_scores, query),
        torch.einsum("hqk,qhd->khd", weights, grad),
    )


attend.register_autograd(_backward, setup_context=_save)
FORWARD = torch.ops.path_gather_test.attend.default  # as a dispatch mode sees it


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output: Tensor = attend(query, key, value)[0]
    return output


class Calls(TorchDispatchMode):
    """Counts the operator's."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func == FORWARD
        return func(*args, **(kwargs or {}))


def keep_attention(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (TOKENS, HEADS, SIZE)
    draw = partial(torch.randn, shape, generator=generator, dtype=torch.float64)
    return [draw().requires_grad_() for _ in range(3)]


def results(form: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    output = form(*tensors)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), tensors)]
