"""megatron-core behind ``TrainEngine``: a model split over tensor ranks and pipeline stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import GatheredParameters
from megatron.core import parallel_state
from torch import Tensor, nn

from easyrl.config import Config, ConfigError
from easyrl.engines.base import (
    MetricSums,
    NonFiniteLossError,
    SavedState,
    StepResult,
    WeightKind,
)
from easyrl.engines.deepspeed.config import schedule_factor
from easyrl.engines.deepspeed.late_denominator import step_divided
from easyrl.engines.deepspeed.state import copy_of, restore
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.making import StageMaker
from easyrl.engines.megatron.open_schedule import OpenSchedule
from easyrl.engines.megatron.padding import padded_row
from easyrl.engines.megatron.pipeline import Pipeline, SingleStage
from easyrl.engines.megatron.process_groups import start_model_parallel
from easyrl.engines.megatron.stage_links import StageLinks
from easyrl.engines.megatron.state import SplitState
from easyrl.engines.megatron.streams import Loss
from easyrl.engines.megatron.trainable import initialise_chunks, sum_tied_embeddings
from easyrl.engines.megatron.weights.gathering import gathered_weights, stage_weights
from easyrl.engines.perturbation import perturbation
from easyrl.engines.process_group import start_process_group
from easyrl.engines.state_file import EngineState
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.recipes.loading import load_recipe
from easyrl.recipes.recipe import Models
from easyrl.runtime.model_spans import ModelSpans
from easyrl.schema import FrozenLogprobs, MicroBatch

REFERENCE, OLD_POLICY = "reference", "old_policy"


class MegatronEngine:
    """A policy split by tensor and pipeline parallelism; see ``TrainEngine`` for its methods.

    All processes of a model-parallel group call each of them with the same arguments. What it
    returns is right on the one that ``Place.tells``, ``StepResult`` on all.

    Raises ``ConfigError`` for what a split model cannot do.
    """

    def __init__(self, config: Config, layout: Layout, *, total_steps: int | None = None) -> None:
        local_rank = start_process_group()
        self.place = start_model_parallel(layout)
        self.ranks = self.place.ranks
        self.device = torch.device(get_accelerator().device_name(local_rank))
        self.spans = ModelSpans.of(self.device)
        self._config, self._layout = config, layout
        self._zero_stage = config.trainer.zero_stage
        self.lockstep = self._zero_stage >= 2 and self.ranks.dp_size > 1
        self._uncontrolled = self._recipe = load_recipe(config)
        needs = self._recipe.needs
        _refuse(config, needs)
        attention = CheckedAttention(config.model.attention)
        maker = StageMaker(config, self.place, attention, self.device)
        self._chunks = maker.trained()
        self._whole = maker.whole_model(self._chunks[0])
        self._has_snapshot = needs.old_policy and config.trainer.updates_per_batch > 1
        wanted_models = {REFERENCE: needs.reference, OLD_POLICY: self._has_snapshot}
        self._frozen = {name: maker.frozen() for name, wanted in wanted_models.items() if wanted}
        self.can_look_ahead = bool(self._frozen)
        factor = schedule_factor(config.trainer, total_steps or config.trainer.max_steps)
        self._engine = initialise_chunks(config, self._chunks, factor)
        wanted, span = config.model.logprob_backward, self._recipe.span
        self._same_pass = span == "token" if wanted == "auto" else wanted == "same_pass"
        self._old_is_policy = True
        self._sampled_by: str | None = "policy"
        self._num_backwards = 0
        self._runner = self._make_runner()

    # ---- training --------------------------------------------------------------------------------

    def set_controls(self, controls: Mapping[str, float]) -> None:
        self._recipe = self._uncontrolled.controlled(controls)

    def begin_batch(self) -> None:
        if self._has_snapshot:
            for old, own in zip(self._frozen[OLD_POLICY], self._chunks, strict=True):
                for kept, parameter in zip(old.parameters(), own.parameters(), strict=True):
                    with GatheredParameters([parameter]):
                        restore([kept], copy_of([parameter]))
        self._old_is_policy = True  # in the first update: no forward of the snapshot
        self._sampled_by = "policy"

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return list(micro_batches)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> list[MetricSums]:
        """Rows of which the frozen models have said all go without these."""
        rows = self._on_device(micro_batches)
        told: list[tuple[MetricSums, str | None]] = []
        for frozen, some in itertools.groupby(rows, self._unknown):
            told += self._runner.forward_backward(list(some), self._loss(), frozen)
        self._num_backwards += len(rows)
        problems = [f"micro-batch {i}: {said}" for i, (_, said) in enumerate(told) if said]
        if problems:
            raise NonFiniteLossError(problems[-1])
        return [metrics for metrics, _ in told]

    def finish_backwards(self) -> list[MetricSums]:
        self._runner.finish()
        return []

    def optimizer_step(self, denominator: float, value_denominator: float = 0.0) -> StepResult:
        assert denominator > 0
        learning_rate = float(self._engine.get_lr()[0])
        self._runner.finish()
        if self._backwards_of_all_ranks() == 0:
            return StepResult(grad_norm=0.0, learning_rate=learning_rate, skipped=True)
        if self._num_backwards == 0:  # other ranks had rows; DeepSpeed reduces only what exists
            self._runner.backward_of_nothing(scale=0.0)
        sum_tied_embeddings(self._engine, self._chunks)
        grad_norm, applied = step_divided(self._engine, denominator / self.ranks.dp_size)
        self._num_backwards = 0
        if applied:
            self._old_is_policy = False
            self._sampled_by = "old_policy" if self._has_snapshot else None
        return StepResult(grad_norm, learning_rate, skipped=not applied)

    def discard_gradients(self) -> None:
        """By a step that cannot be taken."""
        self._runner.finish()
        self._runner.backward_of_nothing(scale=math.nan)
        _, applied = step_divided(self._engine, 1.0)
        assert not applied
        self._num_backwards = 0

    # ---- without gradient ------------------------------------------------------------------------

    @property
    def has_frozen_models(self) -> bool:
        return bool(self._needed)

    def frozen_logprobs(self, micro_batch: MicroBatch) -> FrozenLogprobs:
        if not self._needed:
            return FrozenLogprobs(None, None)
        rows, temperature = self._on_device([micro_batch]), self._config.rollout.temperature
        said = self._runner.frozen_logprobs(rows, temperature, self._needed)
        return said[0] if said else FrozenLogprobs(None, None)

    def evaluate(self, micro_batch: MicroBatch) -> MetricSums:
        rows = self._on_device([micro_batch])
        said = self._runner.evaluate(rows, self._loss(), self._unknown(rows[0]))
        return said[0] if said else MetricSums()

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        rows, temperature = self._on_device([micro_batch]), self._config.rollout.temperature
        said = self._runner.policy_logprobs(rows, temperature)
        return said[0].float().cpu() if said else torch.empty(0)

    # ---- weights ---------------------------------------------------------------------------------

    def named_weights(self, kind: WeightKind = "full") -> Iterator[tuple[str, Tensor]]:
        assert kind == "full", "adapters and critics are refused"
        return gathered_weights(self._whole, self._parameters())

    def stage_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Of this pipeline stage; valid on ``Layout.writer`` alone. Collective over the stage."""
        return stage_weights(self._whole, self._parameters(), self.place.stage)

    @contextmanager
    def perturbed_weights(self, kind: str = "full") -> Iterator[None]:
        """Inside, all copies and parts of a parameter are scaled by one factor of its own."""
        assert kind == "full", "adapters are refused"
        parameters = self._parameters()
        tensors = self._local(parameters.values())
        saved = copy_of(tensors)
        for name, tensor in zip(parameters, tensors, strict=True):
            tensor.mul_(perturbation(self._whole.rules[name].tensors[0]))
        try:
            yield
        finally:
            restore(self._local(parameters.values()), saved)

    def snapshot(self) -> EngineState:
        return self._state().snapshot()

    def restore(self, saved: SavedState) -> None:
        self._state().restore(saved)

    # ---- parts -----------------------------------------------------------------------------------

    def _state(self) -> SplitState:
        return SplitState(self._config, self._engine, self._parameters(), self._whole, self.place)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """This rank's, named as the whole model's."""
        return {name: p for chunk in self._chunks for name, p in chunk.global_parameters()}

    def _local(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """This rank's storage of each parameter, with nothing gathered by ZeRO-3."""
        if self._zero_stage < 3:
            return [parameter.data for parameter in parameters]
        self._engine.optimizer.empty_partition_cache()
        with_shards: list[Any] = list(parameters)  # DeepSpeed adds the attribute
        return [parameter.ds_tensor.data for parameter in with_shards]

    def _make_runner(self) -> Pipeline:
        layout = self._layout
        policy = self._engine if layout.chunks == 1 else None
        parts = (layout, self._chunks, policy, self._frozen, self.device)
        if layout.pipeline == 1:
            return SingleStage(*parts, spans=self.spans)
        if layout.is_open_schedule:
            return OpenSchedule(*parts, spans=self.spans, links=StageLinks(self.place))
        return Pipeline(*parts, spans=self.spans)

    def _loss(self) -> Loss:
        return Loss(
            self._recipe, self._same_pass, self._sampled_by, self._config.rollout.temperature
        )

    def _on_device(self, rows: Sequence[MicroBatch]) -> list[MicroBatch]:
        multiple = self._layout.row_multiple
        return [padded_row(row, multiple).to(self.device) for row in rows]

    @property
    def _needed(self) -> tuple[str, ...]:
        """Frozen models that differ from the policy."""
        return tuple(n for n in self._frozen if n != OLD_POLICY or not self._old_is_policy)

    def _unknown(self, row: MicroBatch) -> tuple[str, ...]:
        """Frozen models whose log-probabilities do not come with ``row``."""
        given = row.frozen or FrozenLogprobs(None, None)
        return tuple(name for name in self._needed if getattr(given, name) is None)

    def _backwards_of_all_ranks(self) -> int:
        count = torch.tensor([self._num_backwards], device=self.device)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(count, group=group)
        return int(count)


def _refuse(config: Config, needs: Models) -> None:
    """Raises ``ConfigError`` for what the recipe asks of a model that is split."""
    key, name = config.parallel.split_key, config.recipe.name
    for what, wanted in (("a critic", needs.critic), ("a teacher", needs.teacher is not None)):
        if wanted:
            raise ConfigError(
                f"{key}: recipe {name} needs {what}, which is not built for a model that is split; "
                f"remove {key} and use trainer.zero_stage, or another recipe"
            )
