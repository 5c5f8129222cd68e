"""Models by a short name, with the sizes that their ``config.json`` has; no file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from easyrl.config import ModelConfig
from easyrl.memory_plan.model_shape import ModelShape, model_shape, shape_of

KNOWN = {
    "8b": "Qwen3-8B",
    "32b": "DeepSeek-R1-Distill-Qwen-32B",
    "30b-a3b": "Qwen3-30B-A3B",
}
_SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "32b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


def shape_named(model: str) -> ModelShape:
    """Of a short name, or of a folder with a ``config.json``.

    Raises ``ValueError`` with the known names, and ``ConfigError`` as ``model_shape`` does.
    """
    if (sizes := _SIZES.get(model.lower())) is not None:
        from transformers import AutoConfig

        return shape_of(AutoConfig.for_model(**sizes, tie_word_embeddings=False))
    if not Path(model).is_dir():
        known = ", ".join(f"{short} ({name})" for short, name in KNOWN.items())
        raise ValueError(f"--model: {model!r} is no folder, and none of {known}")
    return model_shape(ModelConfig(path=Path(model)))
