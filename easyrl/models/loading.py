"""A Hugging Face causal language model from disk, ready for packed rows."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from easyrl.config import ModelConfig
from easyrl.models.activation_checkpointing import checkpoint_activations
from easyrl.models.fused_layers import fuse_layers
from easyrl.models.lora import add_adapter
from easyrl.models.policy_model import ATTENTION, PolicyModel
from easyrl.runtime.numerics import own_memory

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# Frequencies that depend on a forward's longest sequence: a row's groups would change each other.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_policy_model(
    model: ModelConfig, *, dtype: torch.dtype | None = None, seed: int = 0
) -> PolicyModel:
    """The model at ``model.path`` in training mode, in ``dtype`` (default: ``model.dtype``'s).

    With ``model.lora`` it is frozen but for an adapter, which is drawn from ``seed``.

    Raises ``ValueError`` naming ``model.path`` if the folder holds no model or one that cannot run
    on packed rows.
    """
    try:
        config = AutoConfig.from_pretrained(model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path: {model.path} holds no Hugging Face model ({error}); "
            "give a folder with config.json and safetensors files"
        ) from None
    _check_supported(config, model)
    dtype = dtype or DTYPES[model.dtype]
    hf_model = AutoModelForCausalLM.from_pretrained(
        model.path,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION,
        # None is transformers' choice, the grouped product, which takes no doubles.
        experts_implementation="eager" if dtype == torch.float64 else None,
        local_files_only=True,
    )
    own_memory(hf_model)
    if model.lora is not None:
        add_adapter(hf_model, model.lora, seed)
    fuse_layers(hf_model, model.fused_layers)
    checkpoint_activations(hf_model, model.activation_checkpointing, model.checkpoint_every)
    # No dropout in these models: training mode only switches activation checkpointing on.
    return PolicyModel(hf_model, model.logprob_chunk_size, model.attention).train()


def _check_supported(config: PreTrainedConfig, model: ModelConfig) -> None:
    architecture = (config.architectures or [config.model_type])[0]
    if architecture not in SUPPORTED:
        raise ValueError(
            f"model.path: {model.path} is a {architecture}, whose attention is not known to run on "
            f"packed rows; supported are {', '.join(SUPPORTED)}"
        )
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    obstacles = {
        "sliding-window attention (use_sliding_window)": architecture != "LlamaForCausalLM"
        and config.sliding_window is not None,
        "attention dropout (attention_dropout)": bool(config.attention_dropout),
        f"{rope_type} rotary frequencies (rope_parameters)": rope_type in LENGTH_DEPENDENT_ROPE,
    }
    found = [name for name, present in obstacles.items() if present]
    if found:
        raise ValueError(
            f"model.path: {model.path} is a {architecture} with {' and '.join(found)}, which "
            "packed rows do not support; use a model without it"
        )
