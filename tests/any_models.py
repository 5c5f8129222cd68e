"""Random models of families beyond those of ``tiny_models``: other attention, norms and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.tiny_models import VOCAB_SIZE

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_GPT_2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_OWN_NAMES = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
_LAYERS = ["sliding_attention", "full_attention"]
# Name → model type and settings. ``mistral`` and ``gemma3`` have windows that are long enough.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": VOCAB_SIZE, **_GPT_2, **_OWN_NAMES}),
    "gemma3": (
        "gemma3_text",
        _COMMON | {"head_dim": 16, "sliding_window": 256, "layer_types": _LAYERS},
    ),
    "mistral": ("mistral", _COMMON | {"sliding_window": 256}),
    "phi": ("phi", _COMMON | {"num_key_value_heads": 4}),
    "olmo": ("olmo", _COMMON | {"clip_qkv": 0.9}),
    "cohere": ("cohere", _COMMON | {"logit_scale": 0.25}),
    "granite": ("granite", _COMMON | {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "gpt_neox": ("gpt_neox", _COMMON),
    # not on packed rows
    "short_windows": ("mistral", _COMMON | {"sliding_window": 8}),
    "gemma3_short_windows": (
        "gemma3_text",
        _COMMON | {"head_dim": 16, "sliding_window": 8, "layer_types": _LAYERS},
    ),
    "gemma2": (
        "gemma2",
        _COMMON
        | {"head_dim": 16, "sliding_window": 8, "layer_types": _LAYERS}
        | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
    ),
    "bloom": ("bloom", {"vocab_size": VOCAB_SIZE, **_OWN_NAMES}
        | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
}  # fmt: skip
PACKED = ("gpt2", "gemma3", "mistral", "phi", "olmo", "cohere", "granite", "gpt_neox")
NOT_PACKED = ("short_windows", "gemma3_short_windows", "gemma2", "bloom")


def any_model(name: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """An fp32 model whose weights are large enough for every token to depend on the others."""
    model_type, settings = SETTINGS[name]
    config = CONFIG_MAPPING[model_type](**(settings | overrides))
    torch.manual_seed(seed)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            std = parameter.shape[-1] ** -0.5
            nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=std)
    return model.eval()


def save_any_model(folder: Path, name: str, **overrides: object) -> Path:
    any_model(name, **overrides).save_pretrained(folder)  # type: ignore[arg-type]
    return folder
