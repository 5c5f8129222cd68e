"""This process's part of a model, read from its files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from easyrl.config import Config
from easyrl.engines.megatron.layout import Place
from easyrl.engines.megatron.splittable import stage_of
from easyrl.engines.megatron.stage import PolicyStage
from easyrl.engines.megatron.weights.gathering import WholeModel
from easyrl.engines.megatron.weights.loading import stored_shapes
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.models.activation_checkpointing import checkpoint_layers
from easyrl.models.loading import DTYPES
from easyrl.models.supported import read_model_config, require_known_packed


@dataclass(frozen=True)
class StageMaker:
    """Loads the chunks of layers of a pipeline stage, as often as they are wanted.

    Raises ``ConfigError`` naming ``parallel`` or ``model.path`` where the model cannot be split so.
    """

    config: Config
    place: Place
    attention: CheckedAttention
    device: torch.device

    def trained(self) -> list[PolicyStage]:
        """The policy's."""
        model = self.config.model
        chunks = [chunk.train() for chunk in self._load()]
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        checkpoint_layers(layers[:: model.checkpoint_every], model.recomputed)
        return chunks

    def frozen(self) -> list[PolicyStage]:
        """Those of a model that is only run."""
        return [chunk.requires_grad_(False).eval() for chunk in self._load()]

    def whole_model(self, stage: PolicyStage) -> WholeModel:
        """What all ranks know of the model of which this process has ``stage``."""
        hf_config = read_model_config(self.config.model)
        num_layers, layout = hf_config.num_hidden_layers, self.place.layout
        stages = {name: stage_of(name, num_layers, layout) for name in stage.rules}
        shapes = stored_shapes(self.config.model.path)
        return WholeModel(stage.rules, shapes, stages, layout, hf_config.num_key_value_heads)

    def _load(self) -> list[PolicyStage]:
        model = self.config.model
        hf_config = read_model_config(model)
        require_known_packed(hf_config, model)
        chunks = [
            PolicyStage(
                hf_config,
                self.place,
                DTYPES[model.dtype],
                attention=self.attention,
                chunk=chunk,
                logprob_chunk_size=model.logprob_chunk_size,
            )
            for chunk in range(self.place.layout.chunks)
        ]
        for chunk in chunks:
            chunk.load(model.path)
            chunk.to(self.device)
        return chunks
