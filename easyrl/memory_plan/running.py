"""Bytes beside what is held while a micro-batch runs: activations, projection, communication."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from easyrl.config import Config
from easyrl.engines.deepspeed.memory import BUFFERED, WEIGHT
from easyrl.engines.megatron.layout import Layout
from easyrl.memory_plan.activations import Sharing, head_bytes, layer_bytes
from easyrl.memory_plan.held import has_old_policy
from easyrl.memory_plan.model_shape import ModelShape
from easyrl.memory_plan.stages import Stage
from easyrl.recipes.recipe import Recipe

# Elements that ZeRO-3 keeps gathered at most (stage3_max_live_parameters).
GATHERED = 10**9


@dataclass(frozen=True)
class Running:
    """On one rank of a stage."""

    rows_in_flight: float  # micro-batches whose activations are there together
    activations: float  # kept for the backward
    working: float  # the most that is there for a moment
    buffers: float  # of communication, and weights that are gathered


class RunningPlan:
    """What is there while rows of ``num_tokens`` run. ``on_cpu``: without an accelerator."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        recipe: Recipe,
        layout: Layout,
        num_tokens: int,
        on_cpu: bool,
    ) -> None:
        self._config, self._model, self._shape = config, config.model, shape
        self._needs, self._layout = recipe.needs, layout
        self._num_tokens, self._on_cpu = num_tokens, on_cpu
        self._sharing = Sharing(layout.tensor, layout.sequence_parallel, config.parallel.is_split)
        self._size = WEIGHT[self._model.dtype]
        self._layer = layer_bytes(shape, self._model.dtype, self._sharing)

    def on_rank(self, stage: Stage) -> Running:
        in_flight = self._in_flight(stage)
        per_token = self._kept(stage) + self._messages(stage)
        return Running(
            rows_in_flight=in_flight,
            activations=per_token * self._num_tokens * in_flight,
            working=self._working(stage),
            buffers=self._buffers(stage),
        )

    def _in_flight(self, stage: Stage) -> float:
        """Rows of the whole stage, with at least as many rows as there are stages."""
        layout = self._layout
        behind = layout.pipeline - 1 - stage.number  # stages
        if layout.chunks == 1:
            return behind + 1
        return (2 * behind + (layout.chunks - 1) * layout.pipeline + 1) / layout.chunks

    def _kept(self, stage: Stage) -> float:
        """Per token, of the stage's layers."""
        again = ceil(stage.num_layers / self._model.checkpoint_every)
        others = stage.num_layers - again
        return again * self._layer.kept(self._model.recomputed) + others * self._layer.kept("none")

    def _messages(self, stage: Stage) -> float:
        """Per token: hidden states that came from the stage before and went to the next, of the
        policy and the frozen models that are run with it.
        """
        if self._layout.pipeline == 1:
            return 0.0
        borders = 2 * self._layout.chunks - stage.is_first - stage.is_last
        return (
            (1 + self._num_frozen)
            * borders
            * self._size
            * self._shape.hidden
            * self._sharing.hidden
        )

    @property
    def _num_frozen(self) -> int:
        """Models that run beside the policy in a pipeline."""
        return self._needs.reference + has_old_policy(self._config, self._needs.old_policy)

    def _working(self, stage: Stage) -> float:
        """In the projection, in a layer's backward, or as the embedding's gradient is formed."""
        shape, layer, model = self._shape, self._layer, self._model
        is_trained = model.lora is None  # the embedding; below adapters it is frozen
        embedding = self._size * shape.embedding_numel / self._layout.tensor * is_trained
        # of the last layer that is computed again; those behind it have been backwards
        behind = (stage.num_layers - 1) % model.checkpoint_every
        again = max(0.0, layer.again(model.recomputed) - behind * layer.everything)
        backward = (again + layer.gradients) * self._num_tokens
        if not stage.is_last:  # a frozen model runs behind the policy, whose activations are there
            frozen = layer.forward * self._num_tokens if self._num_frozen else 0.0
            return max(backward, frozen, embedding if stage.is_first else 0.0)
        if shape.tied:
            backward += embedding  # the projection's part waits for the other
        head = head_bytes(
            shape,
            model.dtype,
            self._sharing,
            self._num_tokens,
            chunk_size=model.logprob_chunk_size,
            on_cpu=self._on_cpu,
            is_trained=is_trained,
        )
        return max(backward, head)

    def _buffers(self, stage: Stage) -> float:
        zero_stage = self._config.trainer.zero_stage
        if zero_stage == 0:
            return 0.0
        is_sharded = zero_stage == 3 and self._layout.data > 1
        return BUFFERED + is_sharded * self._size * min(GATHERED, stage.num_parameters)
