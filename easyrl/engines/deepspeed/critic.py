"""The critic beside the policy: a DeepSpeed engine of its own, trained on the same packed rows.

Of ZeRO 2 at most: its values are read before the advantages, by each rank of the rows that it has,
which sharded weights, gathered by all ranks together, do not allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from easyrl.config import Config
from easyrl.engines.base import MetricSums, SavedState
from easyrl.engines.deepspeed.config import critic_config, schedule_factor
from easyrl.engines.deepspeed.initialise import initialise, num_elements, trained_parameters
from easyrl.engines.deepspeed.late_denominator import step_divided
from easyrl.engines.deepspeed.shards import Shard, shards_of
from easyrl.engines.deepspeed.state import (
    optimizer_pieces,
    restore,
    restore_optimizer,
    restore_schedule,
)
from easyrl.engines.process_group import quiet
from easyrl.engines.state_file import EngineState
from easyrl.engines.weight_names import saved_weights
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.critic import VALUE_HEAD, load_critic_model
from easyrl.models.loading import head_weight_name
from easyrl.recipes.recipe import Recipe
from easyrl.recipes.value_losses import value_loss
from easyrl.runtime.model_spans import ModelSpans
from easyrl.runtime.ranks import Ranks
from easyrl.schema import MicroBatch, Segment

PREFIX, SCHEDULE = "critic/", "critic schedule"  # in a checkpoint: of tensors' names; its own


class DeepSpeedCritic:
    """A critic that is trained, and as it was when the batch began.

    Args:
        config: the whole tree, of the policy.
        ranks: as they share the policy.
        total_steps: where a decaying schedule ends.
        spans: told when it runs.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        device: torch.device,
        *,
        total_steps: int | None = None,
        spans: ModelSpans,
    ) -> None:
        self._spans = spans
        own = critic_config(config)
        load = partial(load_critic_model, own.model, seed=own.run.seed)
        self._ranks, self._device = ranks, device
        with quiet():
            self._model = load()
            # With one update per batch the critic itself is what it was when the batch began.
            has_snapshot = config.trainer.updates_per_batch > 1
            self._snapshot = load().to(device).requires_grad_(False) if has_snapshot else None
        factor = schedule_factor(own.trainer, total_steps or own.trainer.max_steps)
        self._engine = initialise(own, self._model, factor)
        self._has_moved = False  # since the batch began

    # ---- training --------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        if self._snapshot is not None:
            trained = [parameter.data for parameter in self._model.parameters()]
            restore([parameter.data for parameter in self._snapshot.parameters()], trained)
        self._has_moved = False

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Of the critic as the batch began, float32 [N]. Not collective."""
        model = self._model
        if self._has_moved:
            assert self._snapshot is not None
            model = self._snapshot
        with self._spans.span("critic forward"):
            values: Tensor = model(*_inputs(micro_batch.to(self._device)))
        return values

    def forward_backward(
        self, micro_batch: MicroBatch, recipe: Recipe
    ) -> tuple[MetricSums, str | None]:
        """Accumulates the gradient of the recipe's value loss; its metrics, and what is wrong with
        the loss: the gradient is NaN then.
        """
        row = micro_batch.to(self._device)
        with self._spans.span("critic forward"):
            loss_sum, sums = value_loss(self._engine(*_inputs(row)), row, recipe)
        problem = None
        if not bool(torch.isfinite(loss_sum)):
            problem = f"value loss sum is {loss_sum.item()}"
            loss_sum = loss_sum * math.nan
        with self._spans.span("critic backward"):
            self._engine.backward(loss_sum)
        return sums, problem

    def backward_of_nothing(self, scale: float = 0.0) -> None:
        """A backward through all parameters whose gradient is ``scale`` times something."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        values = self._engine(zero, zero, SegmentLayout([Segment(0, 1, -1)]), zero)
        self._engine.backward(values.sum() * scale)

    def step(self, divisor: float) -> tuple[float, bool]:
        """Divides, clips, steps; the norm before the clip and whether it was taken. Collective."""
        stepped = step_divided(self._engine, divisor)
        self._has_moved |= stepped[1]
        return stepped

    def discard_gradients(self) -> None:
        """Drops what is accumulated, by a step that cannot be taken. Collective."""
        self.backward_of_nothing(scale=math.nan)
        _, applied = step_divided(self._engine, 1.0)
        assert not applied

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self._engine.get_lr()[0])

    # ---- weights and checkpoints -----------------------------------------------------------------

    def named_weights(self, *, is_writer: bool) -> Iterator[tuple[str, Tensor]]:
        """As ``critic.path`` takes them: the model's, and the value head's."""
        head = head_weight_name(self._model.model)
        for name, weight in saved_weights(self._model.model, is_writer=is_writer):
            yield VALUE_HEAD if name == head else name, weight

    def snapshot(self) -> EngineState:
        """This rank's share of masters, moments and step counts, under names of its own."""
        pieces = list(optimizer_pieces(self._engine.optimizer, self._shards()))
        return EngineState(pieces, {SCHEDULE: self._engine.lr_scheduler.last_epoch})

    def restore(self, saved: SavedState) -> None:
        """Inverse of ``snapshot``. Collective. Raises ``ValueError`` where it does not fit."""
        restore_optimizer(self._engine.optimizer, self._shards(), saved)
        restore_schedule(self._engine.lr_scheduler, saved.description[SCHEDULE])

    @property
    def num_parameters(self) -> int:
        """That are trained."""
        return sum(map(num_elements, self._parameters().values()))

    def _shards(self) -> list[Shard]:
        return shards_of(self._engine.optimizer, self._parameters(), self._ranks)

    def _parameters(self) -> dict[str, Any]:
        return {f"{PREFIX}{n}": p for n, p in trained_parameters(self._model).items()}


def _inputs(row: MicroBatch) -> tuple[Tensor, Tensor, SegmentLayout, Tensor]:
    """What ``CriticModel`` takes."""
    layout = SegmentLayout(row.segments)
    return row.input_ids, row.position_ids, layout, row.predictor_index
