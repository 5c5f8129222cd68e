"""The sizes of a model, by its ``config.json``: no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from easyrl.config import ConfigError, ModelConfig
from easyrl.dataloaders.packing.cost import with_usual_names
from easyrl.models.supported import trainable_config

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """What weights and activations are counted by."""

    config: PreTrainedConfig
    architecture: str
    parameters: Mapping[str, Shape]  # by Hugging Face's names; a tied one once
    num_layers: int
    hidden: int
    vocabulary: int
    query_heads: int
    queries: int  # features of all query heads
    keys: int  # features of all key heads; values have as many
    mlp: int  # features inside the MLP of one token; of a mixture, of its experts together
    experts_per_token: int  # 0: no mixture
    tied: bool  # input and output embedding are one

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.parameters.values()))

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normalised by head."""
        return any(name.endswith("self_attn.q_norm.weight") for name in self.parameters)

    @property
    def embedding_numel(self) -> int:
        return self.vocabulary * self.hidden


def model_shape(model: ModelConfig) -> ModelShape:
    """Of the model at ``model.path``. Raises ``ConfigError`` naming it if it cannot be trained."""
    return shape_of(trainable_config(model))


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """Of a model that a configuration describes. Raises ``ConfigError`` without attention."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    parameters = {name: tuple(p.shape) for name, p in made.named_parameters()}
    head_size = getattr(config, "head_dim", None) or config.hidden_size // _heads(config)
    key_heads = getattr(config, "num_key_value_heads", None) or _heads(config)
    experts = int(getattr(config, "num_experts_per_tok", 0) or 0)
    return ModelShape(
        config=config,
        architecture=type(made).__name__,
        parameters=parameters,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        query_heads=_heads(config),
        queries=_heads(config) * head_size,
        keys=key_heads * head_size,
        mlp=_mlp_features(config, experts),
        experts_per_token=experts,
        tied=bool(config.tie_word_embeddings),
    )


def _heads(config: PreTrainedConfig) -> int:
    """Query heads. Raises ``ConfigError`` for a model without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise ConfigError(
            f"model.path: a {config.model_type} has no num_attention_heads in its config.json: its "
            "activations cannot be counted"
        )
    return int(heads)


def _mlp_features(config: PreTrainedConfig, experts: int) -> int:
    """Of the widest layer: a mixture may have plain ones among its layers."""
    if not experts:
        return int(with_usual_names(config.to_dict())["intermediate_size"])
    plain = config.intermediate_size if getattr(config, "mlp_only_layers", None) else 0
    return max(int(plain), experts * int(config.moe_intermediate_size))
