"""Models by a short name, with the sizes that their ``config.json`` has; no file is read."""

from __future__ import annotations

from pathlib import Path

from easyrl.config import ModelConfig
from easyrl.memory_plan.model_shape import ModelShape, model_shape, shape_of

KNOWN = {
    "8b": "Qwen3-8B",
    "32b": "DeepSeek-R1-Distill-Qwen-32B",
    "30b-a3b": "Qwen3-30B-A3B",
}


def shape_named(model: str) -> ModelShape:
    """Of a short name, or of a folder with a ``config.json``.

    Raises ``ValueError`` with the known names, and ``ConfigError`` as ``model_shape`` does.
    """
    from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

    match model.lower():
        case "8b":
            return shape_of(
                Qwen3Config(
                    vocab_size=151936,
                    hidden_size=4096,
                    intermediate_size=12288,
                    num_hidden_layers=36,
                    num_attention_heads=32,
                    num_key_value_heads=8,
                    head_dim=128,
                    tie_word_embeddings=False,
                    architectures=["Qwen3ForCausalLM"],
                )
            )
        case "32b":
            return shape_of(
                Qwen2Config(
                    vocab_size=152064,
                    hidden_size=5120,
                    intermediate_size=27648,
                    num_hidden_layers=64,
                    num_attention_heads=40,
                    num_key_value_heads=8,
                    tie_word_embeddings=False,
                    architectures=["Qwen2ForCausalLM"],
                )
            )
        case "30b-a3b":
            return shape_of(
                Qwen3MoeConfig(
                    vocab_size=151936,
                    hidden_size=2048,
                    intermediate_size=6144,
                    moe_intermediate_size=768,
                    num_experts=128,
                    num_experts_per_tok=8,
                    num_hidden_layers=48,
                    num_attention_heads=32,
                    num_key_value_heads=4,
                    head_dim=128,
                    tie_word_embeddings=False,
                    architectures=["Qwen3MoeForCausalLM"],
                )
            )
    if not Path(model).is_dir():
        known = ", ".join(f"{short} ({name})" for short, name in KNOWN.items())
        raise ValueError(f"--model: {model!r} is no folder, and none of {known}")
    return model_shape(ModelConfig(path=Path(model)))
