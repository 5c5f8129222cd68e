"""What a checkpoint's ``config.json`` says of it, before any weight is read: can it be trained?"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from easyrl.config import ConfigError, ModelConfig
from easyrl.models.weight_files import check_weight_files
from easyrl.runtime.user_code import describe

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# Frequencies that depend on a forward's longest sequence: a row's groups would change each other.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
QUANTISED = ("quantization_config", "compression_config")  # of fp8, gptq, awq, bitsandbytes, …


def read_model_config(model: ModelConfig) -> PreTrainedConfig:
    """The configuration of the checkpoint at ``model.path``.

    Raises ``ConfigError`` naming ``model.path`` if the folder holds no model, or one that cannot be
    trained on packed rows.
    """
    config = trainable_config(model)
    check_weight_files(model.path)
    return config


def trainable_config(model: ModelConfig) -> PreTrainedConfig:
    """``read_model_config`` of a folder that needs no weights, its ``config.json`` alone."""
    config = _configuration(model)
    _check_architecture(config, model)
    values = config.to_dict()
    _check_not_quantised(values, model)
    _check_auxiliary_loss(values, model)
    return config


def model_notices(model: ModelConfig) -> list[str]:
    """What a run says once at its start: what the checkpoint asks for and is not done.

    Raises ``ConfigError`` as ``read_model_config`` does.
    """
    wanted = _auxiliary_loss(read_model_config(model).to_dict())
    if not wanted:
        return []
    return [
        f"the router's auxiliary loss, which {model.path} asks for ({wanted}), is left out "
        "(model.ignore_router_aux_loss)"
    ]


def vocabulary_size(model: ModelConfig) -> int:
    """Rows of the embedding of the model at ``model.path``: it looks ids up from 0 to one less.

    May be more than the tokenizer has. Raises ``ConfigError`` naming ``model.path``.
    """
    try:
        return int(_configuration(model).get_text_config().vocab_size)
    except AttributeError:
        raise ConfigError(
            f"model.path: {model.path} has no vocab_size in its config.json; give a folder with a "
            "language model"
        ) from None


def end_ids_of(model: ModelConfig) -> frozenset[int]:
    """Ids that end a sequence, of ``generation_config.json`` and ``config.json`` together.

    Raises ``ConfigError`` naming ``model.path``.
    """
    config = _configuration(model)
    try:
        generation = GenerationConfig.from_pretrained(model.path, local_files_only=True)
    except (OSError, ValueError):  # none; servers then make one of config.json
        generation = GenerationConfig.from_model_config(config)
    text = config.get_text_config()
    found: list[object] = []
    for ids in (generation.eos_token_id, getattr(text, "eos_token_id", None)):
        found += ids if isinstance(ids, list) else [ids]
    return frozenset(each for each in found if isinstance(each, int))


def _configuration(model: ModelConfig) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            model.path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers' checks raise errors of many kinds
        raise ConfigError(
            f"model.path: {model.path} holds no Hugging Face model ({describe(error):.150}); "
            "give a folder with config.json and safetensors files"
        ) from None


def _check_architecture(config: PreTrainedConfig, model: ModelConfig) -> None:
    architecture = (config.architectures or [config.model_type])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model.path: {model.path} is a {architecture}, whose attention is not known to run on "
            f"packed rows; supported are {', '.join(ARCHITECTURES)}"
        )
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    obstacles = {
        "sliding-window attention (sliding_window)": architecture != "LlamaForCausalLM"
        and config.sliding_window is not None,
        "attention dropout (attention_dropout)": bool(config.attention_dropout),
        f"{rope_type} rotary frequencies (rope_parameters)": rope_type in LENGTH_DEPENDENT_ROPE,
    }
    found = [name for name, present in obstacles.items() if present]
    if found:
        raise ConfigError(
            f"model.path: {model.path} is a {architecture} with {' and '.join(found)}, which "
            "packed rows do not support; use a model without it"
        )


def _check_not_quantised(values: dict[str, Any], model: ModelConfig) -> None:
    """Quantised weights have no gradient, and the endpoints would be sent others than they hold."""
    for key in QUANTISED:
        settings = values.get(key)
        if not settings:
            continue
        method = settings.get("quant_method", "") if isinstance(settings, dict) else ""
        raise ConfigError(
            f"model.path: {model.path} is a quantised checkpoint ({key} in its config.json"
            f"{f', {method}' if method else ''}), which cannot be trained; use the bf16 checkpoint "
            "that it was made from, or dequantise it and remove the key"
        )


def _check_auxiliary_loss(values: dict[str, Any], model: ModelConfig) -> None:
    """The router's load-balancing loss (Fedus et al. 2021, eq. 4) is a product of two means over
    all tokens of a batch: a sum over packed rows with a late denominator cannot form it.
    """
    wanted = _auxiliary_loss(values)
    if wanted and not model.ignore_router_aux_loss:
        raise ConfigError(
            f"model.path: {model.path} asks for the router's auxiliary loss ({wanted} in its "
            "config.json), which is a product of means over a whole batch and cannot be formed "
            "from streamed rows; to train without it set model.ignore_router_aux_loss=true"
        )


def _auxiliary_loss(values: dict[str, Any]) -> str:
    """The settings that ask for it; empty without."""
    if not (values.get("output_router_logits") and values.get("router_aux_loss_coef")):
        return ""
    return f"output_router_logits with router_aux_loss_coef={values['router_aux_loss_coef']}"
