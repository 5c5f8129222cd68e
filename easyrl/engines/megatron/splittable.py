"""Whether a model can be split, and so: by its configuration, without megatron-core."""

from __future__ import annotations

from transformers import PreTrainedConfig

from easyrl.config import ConfigError
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.weights.mapping import LAYERS

WITH_QKV_BIAS = {"Qwen2ForCausalLM"}


def architecture_of(config: PreTrainedConfig) -> str:
    """Raises ``ConfigError`` naming ``parallel`` if it is none that can be split."""
    name = str((config.architectures or [config.model_type])[0])
    if name not in LAYERS:
        raise ConfigError(
            f"parallel: a {name} cannot be split over devices, only {', '.join(LAYERS)}; remove "
            "parallel, and use trainer.zero_stage"
        )
    obstacles = {
        "biases of its attention (attention_bias)": name not in WITH_QKV_BIAS
        and getattr(config, "attention_bias", False),
        "biases of its MLP (mlp_bias)": getattr(config, "mlp_bias", False),
        f"{config.hidden_act} in its MLP (hidden_act)": config.hidden_act != "silu",
    }
    found = [said for said, present in obstacles.items() if present]
    if found:
        raise ConfigError(
            f"parallel: a {name} with {' and '.join(found)} cannot be split over devices; remove "
            "parallel, and use trainer.zero_stage"
        )
    return name


def check_sizes(config: PreTrainedConfig, layout: Layout) -> None:
    """Raises ``ConfigError`` naming the key of ``parallel`` that does not fit the model."""
    shared = {
        "attention heads": config.num_attention_heads,
        "features of its MLP": config.intermediate_size,
    }
    for what, number in shared.items():
        if number % layout.tensor:
            raise ConfigError(
                f"parallel.tensor: {number} {what} cannot be shared by {layout.tensor} ranks; use "
                "a divisor"
            )
    heads = config.num_key_value_heads
    if heads % layout.tensor and layout.tensor % heads:
        raise ConfigError(
            f"parallel.tensor: {heads} key-value heads and {layout.tensor} ranks: neither is a "
            "multiple of the other; use another number of ranks"
        )
    if layout.layers_per_stage is not None:
        total = sum(layout.layers_per_stage)
        if total != config.num_hidden_layers:
            raise ConfigError(
                f"parallel.layers_per_stage: {list(layout.layers_per_stage)} are {total} layers, "
                f"the model has {config.num_hidden_layers}; correct them"
            )
        return
    stages = layout.pipeline * layout.chunks
    if config.num_hidden_layers % stages:
        raise ConfigError(
            f"parallel.pipeline: {config.num_hidden_layers} layers cannot be shared evenly by "
            f"{stages} stages; set parallel.layers_per_stage"
        )


def stage_of(parameter: str, num_layers: int, layout: Layout) -> int:
    """The pipeline stage that has a parameter, named as the whole model's."""
    if parameter.startswith("embedding."):
        return 0
    if not parameter.startswith("decoder.layers."):
        return layout.pipeline - 1
    return layout.stage_of(int(parameter.split(".")[2]), num_layers)
