"""megatron-core behind ``TrainEngine``: a model split over tensor ranks and pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn

from easyrl.config import Config
from easyrl.engines.base import MetricSums, NonFiniteLossError, StepResult
from easyrl.engines.deepspeed.config import schedule_factor
from easyrl.engines.deepspeed.late_denominator import step_divided
from easyrl.engines.deepspeed.state import copy_of, restore
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.padding import padded_row
from easyrl.engines.megatron.pipeline import Pipeline
from easyrl.engines.megatron.process_groups import start_model_parallel
from easyrl.engines.megatron.stage import PolicyStage
from easyrl.engines.megatron.streams import Loss, StreamStage
from easyrl.engines.megatron.trainable import initialise_chunks, sum_tied_embeddings
from easyrl.engines.megatron.weights.gathering import WholeModel, gathered_weights
from easyrl.engines.megatron.weights.loading import stored_shapes
from easyrl.engines.process_group import start_process_group
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.models.loading import DTYPES
from easyrl.models.supported import read_model_config
from easyrl.models.tri_model import FrozenModel, TriModel
from easyrl.recipes.loading import load_recipe
from easyrl.schema import MicroBatch


class MegatronEngine:
    """A policy split by tensor and pipeline parallelism; see ``TrainEngine`` for its methods.

    Without a pipeline the three models run as in DeepSpeed's engine; with one, rows go through
    megatron-core's schedules.
    """

    def __init__(self, config: Config, layout: Layout, *, total_steps: int | None = None) -> None:
        local_rank = start_process_group()
        self.place = start_model_parallel(layout)
        self.ranks = self.place.ranks
        self.device = torch.device(get_accelerator().device_name(local_rank))
        self._config, self._layout = config, layout
        self._recipe = load_recipe(config)
        needs = self._recipe.needs
        self._has_snapshot = needs.old_policy and config.trainer.updates_per_batch > 1
        self._attention = CheckedAttention(config.model.attention)
        self._chunks = self._load()
        self._frozen: dict[str, list[PolicyStage]] = {}
        if needs.reference:
            self._frozen["reference"] = self._load_frozen()
        if self._has_snapshot:
            self._frozen["old_policy"] = self._load_frozen()
        factor = schedule_factor(config.trainer, total_steps or config.trainer.max_steps)
        self._engine = initialise_chunks(config, self._chunks, factor)
        wanted, span = config.model.logprob_backward, self._recipe.span
        self._same_pass = span == "token" if wanted == "auto" else wanted == "same_pass"
        self._old_is_policy = True
        self._sampled_by: str | None = "policy"
        self._pipeline = self._make_pipeline() if layout.pipeline > 1 else None
        self._tri_model = self._make_tri_model() if layout.pipeline == 1 else None

    # ---- training --------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        if self._has_snapshot:
            for old, own in zip(self._frozen["old_policy"], self._chunks, strict=True):
                for kept, parameter in zip(old.parameters(), own.parameters(), strict=True):
                    with GatheredParameters([parameter]):
                        restore([kept], copy_of([parameter]))
            self._set_old_is_policy(True)
        self._sampled_by = "policy"

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> list[MetricSums]:
        rows = [self._padded(row).to(self.device) for row in micro_batches]
        if self._pipeline is not None:
            return self._pipeline.forward_backward(rows, self._loss())
        assert self._tri_model is not None
        self._tri_model.sampled_by = self._sampled_by  # type: ignore[assignment]
        metrics, problem = [], None
        for index, row in enumerate(rows):
            loss_sum, sums = self._tri_model.loss(row, self._recipe, same_pass=self._same_pass)
            if not bool(torch.isfinite(loss_sum)):
                problem = f"micro-batch {index}: loss sum is {loss_sum.item()}"
                loss_sum = loss_sum * math.nan
            self._engine.backward(loss_sum)
            metrics.append(sums)
        if problem is not None:
            raise NonFiniteLossError(problem)
        return metrics

    def optimizer_step(self, denominator: float, value_denominator: float = 0.0) -> StepResult:
        assert denominator > 0
        learning_rate = float(self._engine.get_lr()[0])
        sum_tied_embeddings(self._engine, self._chunks)
        grad_norm, applied = step_divided(self._engine, denominator / self.ranks.dp_size)
        if applied:
            self._set_old_is_policy(False)
            self._sampled_by = "old_policy" if self._has_snapshot else None
        return StepResult(grad_norm, learning_rate, skipped=not applied)

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> Tensor | None:
        """The policy's, float32 [N], on the CPU; on the last stage, None on others. Collective."""
        row = self._padded(micro_batch).to(self.device)
        if self._tri_model is not None:
            return self._tri_model.policy_logprobs(row).float().cpu()
        streams = [StreamStage(own, own, {"reference": own}) for own in self._chunks]
        pipeline = Pipeline(self._layout, streams)
        said = pipeline.frozen_logprobs([row] * self._least_rows, self._config.rollout.temperature)
        if not pipeline.is_last:
            return None
        logprobs = said[0].reference
        assert logprobs is not None
        return logprobs.float().cpu()

    # ---- weights ---------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return gathered_weights(self._whole_model(), self._parameters())

    def _parameters(self) -> dict[str, nn.Parameter]:
        """This rank's, named as the whole model's."""
        return {name: p for chunk in self._chunks for name, p in chunk.global_parameters()}

    def _whole_model(self) -> WholeModel:
        hf_config = read_model_config(self._config.model)
        rules = self._chunks[0].rules
        return WholeModel(
            rules,
            stored_shapes(self._config.model.path),
            {name: self._stage_of(name, hf_config.num_hidden_layers) for name in rules},
            self._layout,
            hf_config.num_key_value_heads,
        )

    def _stage_of(self, name: str, num_layers: int) -> int:
        """The pipeline stage that has a parameter."""
        if name.startswith("embedding."):
            return 0
        if not name.startswith("decoder.layers."):
            return self._layout.pipeline - 1
        chunk_size = num_layers // (self._layout.pipeline * self._layout.chunks)
        return int(name.split(".")[2]) // chunk_size % self._layout.pipeline

    # ---- making ----------------------------------------------------------------------------------

    def _load(self) -> list[PolicyStage]:
        """This stage's chunks of the model at ``model.path``."""
        model = self._config.model
        chunks = [
            PolicyStage(
                read_model_config(model),
                self.place,
                DTYPES[model.dtype],
                attention=self._attention,
                chunk=chunk,
                logprob_chunk_size=model.logprob_chunk_size,
            )
            for chunk in range(self._layout.chunks)
        ]
        for chunk in chunks:
            chunk.load(model.path)
            chunk.to(self.device).train()
        return chunks

    def _load_frozen(self) -> list[PolicyStage]:
        return [chunk.requires_grad_(False).eval() for chunk in self._load()]

    def _make_tri_model(self) -> TriModel:
        frozen = {name: FrozenModel(chunks[0]) for name, chunks in self._frozen.items()}
        models = TriModel(
            self._engine,
            reference=frozen.get("reference"),
            old_policy=frozen.get("old_policy"),
            temperature=self._config.rollout.temperature,
            device=self.device,
        )
        models.old_is_policy = True
        return models

    def _make_pipeline(self) -> Pipeline:
        names = [n for n in self._frozen if n != "old_policy" or not self._old_is_policy]
        streams = []
        for index, chunk in enumerate(self._chunks):
            policy = self._engine if self._layout.chunks == 1 else chunk
            frozen = {name: self._frozen[name][index] for name in names}
            streams.append(StreamStage(policy, chunk, frozen))
        return Pipeline(self._layout, streams)

    def _set_old_is_policy(self, is_policy: bool) -> None:
        """In a batch's first update there is no forward of the snapshot."""
        self._old_is_policy = is_policy
        if self._tri_model is not None:
            self._tri_model.old_is_policy = is_policy
        else:
            self._pipeline = self._make_pipeline()

    def _loss(self) -> Loss:
        return Loss(
            self._recipe, self._same_pass, self._sampled_by, self._config.rollout.temperature
        )

    def _padded(self, row: MicroBatch) -> MicroBatch:
        return padded_row(row, self._layout.tensor) if self._layout.sequence_parallel else row

    @property
    def _least_rows(self) -> int:
        """Of a schedule."""
        return self._layout.pipeline if self._layout.chunks > 1 else 1
