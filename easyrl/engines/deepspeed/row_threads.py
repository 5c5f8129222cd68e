"""Packed rows trained beside one another on a CPU, a thread for each, instead of one by many.

Threads that share each small operation wait for one another between any two of them; two rows with
a thread each do not (docs/benchmarks.md, "Cores follow the work").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from easyrl.engines.base import MetricSums
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel
from easyrl.recipes.recipe import Recipe
from easyrl.runtime.model_spans import ModelSpans
from easyrl.schema import MicroBatch

MOST_ROWS = 8  # at a time: each has its activations
Loss = tuple[Tensor, MetricSums]  # a scalar that carries gradient, and the row's metrics


@dataclass(frozen=True)
class _Trained:
    """A row's loss, with its gradient in each parameter; None: it does not depend on it."""

    loss: Tensor
    sums: MetricSums
    gradients: tuple[Tensor | None, ...]


class RowThreads:
    """As many rows at a time as this process has threads of torch, which they share out.

    The caller's thread has the first of them, through ``tri_model``. The gradient of another one is
    computed by itself in its thread, and added when the caller runs its loss backward: what is
    summed, and in which order, is what one row after the other gives. Where there are as many rows
    as threads it is the same bit by bit as with one thread.

    Args:
        tri_model: around an engine.
        policy: the model in that engine.
    """

    def __init__(self, tri_model: TriModel, policy: PolicyModel) -> None:
        self._own = tri_model
        self._other = replace(tri_model, policy=policy, spans=ModelSpans())
        self._parameters = [p for p in policy.parameters() if p.requires_grad]
        self._pool = ThreadPoolExecutor(MOST_ROWS, thread_name_prefix="rows")
        self._has_run = False  # what compares itself with something plain at first use has done so

    def losses(
        self, rows: Sequence[MicroBatch], recipe: Recipe, *, same_pass: bool
    ) -> Iterator[Loss]:
        """Of each row, as ``TriModel.loss``; each is to be run backward before the next is asked
        for. To be closed if it is not exhausted."""
        rest = list(rows)
        while rest:
            num = min(torch.get_num_threads(), MOST_ROWS) if self._has_run else 1
            now, rest = rest[:num], rest[num:]
            yield from self._together(now, recipe, same_pass)
            self._has_run = True

    def _together(
        self, rows: Sequence[MicroBatch], recipe: Recipe, same_pass: bool
    ) -> Iterator[Loss]:
        if len(rows) == 1:
            yield self._own.loss(rows[0], recipe, same_pass=same_pass)
            return
        num_threads = torch.get_num_threads()
        self._other.old_is_policy = self._own.old_is_policy
        self._other.sampled_by = self._own.sampled_by
        each = num_threads // len(rows)
        torch.set_num_threads(each)
        others = [
            self._pool.submit(self._trained, row, recipe, each, same_pass=same_pass)
            for row in rows[1:]
        ]
        try:
            yield self._own.loss(rows[0], recipe, same_pass=same_pass)
            yield from map(self._given, others)
        finally:
            wait(others)
            torch.set_num_threads(num_threads)

    def _trained(
        self, row: MicroBatch, recipe: Recipe, num_threads: int, *, same_pass: bool
    ) -> _Trained:
        """In a thread of its own: the number of torch's threads is kept for each."""
        torch.set_num_threads(num_threads)
        loss, sums = self._other.loss(row, recipe, same_pass=same_pass)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return _Trained(loss.detach(), sums, gradients)

    def _given(self, other: Future[_Trained]) -> Loss:
        made = other.result()
        return _Given.apply(made, *self._parameters), made.sums


class _Given(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, made: _Trained, *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = made.gradients
        return made.loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        gradients, ctx.gradients = ctx.gradients, ()
        if float(scale) != 1.0:  # an engine's, or NaN
            gradients = [None if g is None else g * scale for g in gradients]
        return (None, *gradients)
