"""Policy, old policy and reference on one micro-batch (paper §4.1, docs/shared_prompts.md).

The three share one architecture and one layout, so one packed row and one attention mask serve all.
A teacher, which some recipes have, is of its own architecture and sees the same row and mask.
What is not needed does not exist: the reference is there only if the recipe needs one, the old
policy only when it is lagged or a batch has several updates; else it is the policy itself, with
ratio 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.logprobs.linear_divergence import TeacherRows
from easyrl.kernels.logprobs.token_losses import RowLoss
from easyrl.models.policy_model import run_micro_batch
from easyrl.models.teacher import FullTeacher
from easyrl.recipes.losses import loss_metrics, policy_loss, token_loss
from easyrl.recipes.recipe import Recipe
from easyrl.runtime.model_spans import ModelSpans
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
    # its log-probabilities of the sampled tokens, or its whole distributions; None: no recipe's
    teacher: Frozen | FullTeacher | None = None
    old_is_policy: bool = False  # for now their weights are the same: one forward serves both
    sampled_by: Literal["policy", "old_policy"] | None = "policy"  # ``TriLogprobs.sampled_by``
    spans: ModelSpans = field(default_factory=ModelSpans)  # told when each of them runs

    def __call__(self, micro_batch: MicroBatch) -> TriLogprobs:
        """The three log-probabilities of the N trained tokens; float32 [N] each."""
        row, layout = self._on_device(micro_batch)
        return self._values(row, layout, self._frozen(row, layout), self._teacher_rows(row, layout))

    def loss(
        self, micro_batch: MicroBatch, recipe: Recipe, *, same_pass: bool
    ) -> tuple[Tensor, MetricSums]:
        """The recipe's loss sum, a scalar that carries the policy's gradient, and its metrics.

        ``same_pass``: the projection to the vocabulary forms its gradient with its values, for a
        recipe of span ``token``; else the backward pass computes it again.
        """
        row, layout = self._on_device(micro_batch)
        frozen, teacher = self._frozen(row, layout), self._teacher_rows(row, layout)
        if not same_pass:
            return policy_loss(self._values(row, layout, frozen, teacher), row, recipe)
        losses = token_loss(row, frozen, recipe)
        loss_sum, logprobs, entropy, *kl = self._policy(row, layout, losses, teacher)
        tri = TriLogprobs(logprobs, entropy, frozen, self.sampled_by, *kl)
        return loss_sum, loss_metrics(tri, row, recipe, loss_sum)

    def frozen_logprobs(self, micro_batch: MicroBatch) -> FrozenLogprobs:
        """Those of reference, old policy and teacher, as far as the recipe needs them; no
        gradient."""
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
        self,
        row: MicroBatch,
        layout: SegmentLayout,
        losses: RowLoss | None = None,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor, ...]:
        with self.spans.span("policy forward"):
            return run_micro_batch(
                self.policy,
                row,
                self.temperature,
                layout=layout,
                token_loss=losses,
                teacher=teacher,
            )

    def _values(
        self,
        row: MicroBatch,
        layout: SegmentLayout,
        frozen: FrozenLogprobs,
        teacher: TeacherRows | None,
    ) -> TriLogprobs:
        logprobs, entropy, *kl = self._policy(row, layout, teacher=teacher)
        return TriLogprobs(logprobs, entropy, frozen, self.sampled_by, *kl)

    def _teacher_rows(self, row: MicroBatch, layout: SegmentLayout) -> TeacherRows | None:
        if not isinstance(self.teacher, FullTeacher):
            return None
        with self.spans.span("teacher forward"):
            return self.teacher.rows(row, layout)

    def _frozen(self, row: MicroBatch, layout: SegmentLayout) -> FrozenLogprobs:
        """What is given with the row; with it the critic's values alone where the models that are
        sharded could not be run before.
        """
        given = row.frozen
        if given is not None and not self._lacks(given):
            return given
        said = self._of_rows([(row, layout)])[0]
        return said if given is None else replace(said, values=given.values)

    def _lacks(self, given: FrozenLogprobs) -> bool:
        scores = self.teacher is not None and not isinstance(self.teacher, FullTeacher)
        pairs = (
            (self.reference is not None, given.reference),
            (self._lags, given.old_policy),
            (scores, given.teacher),
        )
        return any(needed and said is None for needed, said in pairs)

    @property
    def _lags(self) -> bool:
        """Whether the old policy is another model than the policy."""
        return self.old_policy is not None and not self.old_is_policy

    def _of_rows(self, rows: Rows) -> list[FrozenLogprobs]:
        def of(model: Frozen | None, name: str) -> Sequence[Tensor | None]:
            if model is None:
                return [None] * len(rows)
            with self.spans.span(f"{name} forward"):
                return model.logprobs(rows, self.temperature)

        old_policy = self.old_policy if self._lags else None
        teacher = None if isinstance(self.teacher, FullTeacher) else self.teacher
        said = zip(
            of(self.reference, "reference"),
            of(old_policy, "old policy"),
            of(teacher, "teacher"),
            strict=True,
        )
        return [FrozenLogprobs(reference, old, teacher=its) for reference, old, its in said]
