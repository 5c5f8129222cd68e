"""Policy, old policy and reference on one micro-batch (paper §4.1, docs/shared_prompts.md).

The three share one architecture and one layout, so one packed row and one attention mask serve all.
What is not needed does not exist: the reference is there only if the recipe needs one, the old
policy only when it is lagged or a batch has several updates; else it is the policy itself, with
ratio 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.policy_model import run_micro_batch
from easyrl.recipes.losses import TokenLoss, loss_metrics, policy_loss, token_loss
from easyrl.recipes.recipe import Recipe
from easyrl.schema import FrozenLogprobs, MicroBatch

Rows = Sequence[tuple[MicroBatch, SegmentLayout]]  # on the device


class Frozen(Protocol):
    """A model that is only run without gradient (``FrozenModel``, ``OffloadedModel``)."""

    def logprobs(self, rows: Rows, temperature: float) -> list[Tensor]:
        """Log-probabilities float32 [N] of each row."""
        ...


@dataclass
class FrozenModel:
    """A frozen model on the device.

    ``module`` is a ``PolicyModel`` or an engine around one; inside ``in_use`` it is that model: the
    policy's own have another adapter there.
    """

    module: nn.Module
    in_use: Callable[[], AbstractContextManager[None]] = nullcontext

    @torch.no_grad()
    def logprobs(self, rows: Rows, temperature: float) -> list[Tensor]:
        with self.in_use():
            return [
                run_micro_batch(self.module, row, temperature, layout=layout)[0]
                for row, layout in rows
            ]


def frozen_model(module: nn.Module) -> FrozenModel:
    """``module`` frozen, where it is."""
    module.requires_grad_(False).eval()
    return FrozenModel(module)


@dataclass
class TriModel:
    """Runs the models of the recipe; only the policy's result carries gradient.

    The frozen models run first: the policy's activations, which live until the backward, are then
    not there yet. All see the same packed row, its positions and its attention layout.
    """

    policy: nn.Module  # being trained; an engine around it where one intercepts the forward
    reference: Frozen | None  # of the start of the run; None where the recipe needs none
    # The weights before the previous update (``old_policy: lagged``), or those at the start of the
    # batch (``updates_per_batch`` above 1); None where the policy itself is the old policy.
    old_policy: Frozen | None
    temperature: float  # of the sampling, at which all log-probabilities are taken
    device: torch.device
    old_is_policy: bool = False  # for now their weights are the same: one forward serves both
    sampled_by: Literal["policy", "old_policy"] | None = "policy"  # ``TriLogprobs.sampled_by``

    def __call__(self, micro_batch: MicroBatch) -> TriLogprobs:
        """The three log-probabilities of the N trained tokens; float32 [N] each."""
        row, layout = self._on_device(micro_batch)
        frozen = self._frozen(row, layout)
        logprobs, entropy = self._policy(row, layout)
        return TriLogprobs(logprobs, entropy, frozen, self.sampled_by)

    def loss(
        self, micro_batch: MicroBatch, recipe: Recipe, *, same_pass: bool
    ) -> tuple[Tensor, MetricSums]:
        """The recipe's loss sum, a scalar that carries the policy's gradient, and its metrics.

        ``same_pass``: the projection to the vocabulary forms its gradient with its values, for a
        recipe of span ``token``; else the backward pass computes it again.
        """
        row, layout = self._on_device(micro_batch)
        frozen = self._frozen(row, layout)
        if not same_pass:
            logprobs, entropy = self._policy(row, layout)
            tri = TriLogprobs(logprobs, entropy, frozen, self.sampled_by)
            return policy_loss(tri, row, recipe)
        losses = token_loss(row, frozen, recipe)
        loss_sum, logprobs, entropy = self._policy(row, layout, losses)
        tri = TriLogprobs(logprobs, entropy, frozen, self.sampled_by)
        return loss_sum, loss_metrics(tri, row, recipe, loss_sum)

    def frozen_logprobs(self, micro_batch: MicroBatch) -> FrozenLogprobs:
        """Those of reference and old policy, as far as the recipe needs them; no gradient."""
        return self.frozen_logprobs_of([micro_batch])[0]

    def frozen_logprobs_of(self, micro_batches: Sequence[MicroBatch]) -> list[FrozenLogprobs]:
        """``frozen_logprobs`` of each; an offloaded model's weights travel once for all."""
        return self._of_rows([self._on_device(row) for row in micro_batches])

    @torch.no_grad()
    def policy_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """The policy's log-probabilities without gradient, float32 [N]."""
        logprobs, _ = self._policy(*self._on_device(micro_batch))
        return logprobs

    def _on_device(self, micro_batch: MicroBatch) -> tuple[MicroBatch, SegmentLayout]:
        """What all models share of a row."""
        return micro_batch.to(self.device), SegmentLayout(micro_batch.segments)

    def _policy(
        self, row: MicroBatch, layout: SegmentLayout, losses: TokenLoss | None = None
    ) -> tuple[Tensor, ...]:
        return run_micro_batch(self.policy, row, self.temperature, layout=layout, token_loss=losses)

    def _frozen(self, row: MicroBatch, layout: SegmentLayout) -> FrozenLogprobs:
        return self._of_rows([(row, layout)])[0] if row.frozen is None else row.frozen

    def _of_rows(self, rows: Rows) -> list[FrozenLogprobs]:
        def of(model: Frozen | None) -> Sequence[Tensor | None]:
            return [None] * len(rows) if model is None else model.logprobs(rows, self.temperature)

        old_policy = None if self.old_is_policy else self.old_policy
        said = zip(of(self.reference), of(old_policy), strict=True)
        return [FrozenLogprobs(reference, old) for reference, old in said]
