"""A Hugging Face causal language model from disk, ready for rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from easyrl.config import ConfigError, ModelConfig
from easyrl.models.activation_checkpointing import checkpoint_activations
from easyrl.models.dropout import silence_dropout, switch_dropout_off
from easyrl.models.fused_layers import fuse_layers
from easyrl.models.lora import add_adapter
from easyrl.models.policy_model import PolicyModel
from easyrl.models.row_check import RowVerdict, row_verdict
from easyrl.models.row_forward import ATTENTION, OWN_ATTENTION
from easyrl.models.supported import architecture_of, read_model_config
from easyrl.runtime.numerics import own_memory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_policy_model(
    model: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    has_head: bool = True,
) -> PolicyModel:
    """The model at ``model.path`` in training mode, in ``dtype`` (default: ``model.dtype``'s).

    With ``model.lora`` it is frozen but for an adapter, which is drawn from ``seed``.
    Without ``has_head`` its files may lack the projection to the vocabulary, which is then random.

    Raises ``ConfigError`` naming ``model.path`` if the folder holds no model, one whose
    log-probabilities would not be its own, or not all of its weights; naming ``model.attention`` if
    it cannot run on packed rows and that is not ``own``.
    """
    config = read_model_config(model)
    verdict = _checked_rows(config, model)
    switch_dropout_off(config)
    dtype = dtype or DTYPES[model.dtype]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model.path,
        config=config,
        dtype=dtype,
        attn_implementation=None if model.attention == OWN_ATTENTION else ATTENTION,
        # None is transformers' choice, the grouped product, which takes no doubles.
        experts_implementation="eager" if dtype == torch.float64 else None,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # told below, with the file's name
        output_loading_info=True,
    )
    hf_model, found = loaded
    if other := sorted(found["mismatched_keys"]):
        name, *shapes = other[0]
        raise ConfigError(
            f"model.path: {model.path} has weights of other shapes than its config.json says: "
            f"{name} is {', its config.json says '.join(str(list(s)) for s in shapes)}; give the "
            "config.json that belongs to the weights"
        )
    own_head = set() if has_head else {head_weight_name(hf_model)}
    missing = sorted(set(found["missing_keys"]) - own_head)
    if missing:  # transformers draws them at random
        raise ConfigError(
            f"model.path: {model.path} has no weights for {len(missing)} parameters, {missing[0]} "
            "first; give a folder with all safetensors files of the model"
        )
    own_memory(hf_model)
    if model.lora is not None:
        add_adapter(hf_model, model.lora, seed)
    # Fused layers are known to be right on packed rows.
    is_padded = model.attention == OWN_ATTENTION
    fuse_layers(hf_model, "none" if is_padded else model.fused_layers)
    checkpoint_activations(hf_model, model.recomputed, model.checkpoint_every)
    silence_dropout(hf_model)  # training mode only switches activation checkpointing on
    narrow = verdict.narrow is None
    return PolicyModel(hf_model, model.logprob_chunk_size, model.attention, narrow).train()


def head_weight_name(model: PreTrainedModel) -> str:
    """Of the weight of the projection to the vocabulary."""
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _checked_rows(config: PreTrainedConfig, model: ModelConfig) -> RowVerdict:
    verdict = row_verdict(config)
    if verdict.padded is not None:
        raise ConfigError(
            f"model.path: {model.path} is a {architecture_of(config)} that cannot be trained: "
            f"{verdict.padded}; use another model"
        )
    if model.attention != OWN_ATTENTION and verdict.packed is not None:
        raise ConfigError(
            f"model.attention: {model.path} is a {architecture_of(config)}, which cannot run on "
            f"packed rows ({verdict.packed}); set model.attention=own and trainer.packing=none"
        )
    return verdict


@contextmanager
def path_errors_named(key: str) -> Iterator[None]:
    """Inside, a ``ConfigError`` about ``model.path`` names ``key``, which that folder is from."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", key)) from None
