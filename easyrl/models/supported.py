"""What a checkpoint's ``config.json`` says of it, before any weight is read: can it be trained?"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from easyrl.config import ConfigError, ModelConfig
from easyrl.models.dropout import dropout_settings
from easyrl.models.weight_files import check_weight_files
from easyrl.runtime.user_code import describe

# Of which engines and parts know more than that their attention can be replaced.
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

    Raises ``ConfigError`` naming ``model.path`` if the folder holds no causal language model, or
    one that cannot be trained. Whether on packed rows is another question (``row_check``).
    """
    config = trainable_config(model)
    check_weight_files(model.path)
    return config


def trainable_config(model: ModelConfig) -> PreTrainedConfig:
    """``read_model_config`` of a folder that needs no weights, its ``config.json`` alone."""
    config = _configuration(model)
    _check_causal(config, model)
    values = config.to_dict()
    _check_not_quantised(values, model)
    _check_auxiliary_loss(values, model)
    return config


def model_notices(model: ModelConfig) -> list[str]:
    """What a run says once at its start: what the checkpoint asks for and is not done.

    Raises ``ConfigError`` as ``read_model_config`` does.
    """
    config = read_model_config(model)
    notices = []
    if wanted := _auxiliary_loss(config.to_dict()):
        notices.append(
            f"the router's auxiliary loss, which {model.path} asks for ({wanted}), is left out "
            "(model.ignore_router_aux_loss)"
        )
    if rates := dropout_settings(config):
        asked = ", ".join(f"{name}={rate:g}" for name, rate in sorted(rates.items()))
        notices.append(
            f"dropout, which {model.path} asks for ({asked}), is off: the model that is trained "
            "is the one that is sampled from"
        )
    return notices


def architecture_of(config: PreTrainedConfig) -> str:
    return (config.architectures or [config.model_type])[0]


def sliding_window_of(config: PreTrainedConfig) -> int | None:
    """Tokens that the sliding layers see, if there are such layers."""
    values = config.to_dict()
    window = values.get("sliding_window")
    kinds = values.get("layer_types")
    if not window or values.get("use_sliding_window") is False:
        return None
    return None if kinds and "sliding_attention" not in kinds else int(window)


def rope_limit_of(config: PreTrainedConfig) -> int | None:
    """Tokens up to which rotary frequencies do not depend on the longest sequence of a forward;
    None: at any length.
    """
    ropes: Any = config.to_dict().get("rope_parameters") or {}
    by_layer_type = "rope_type" not in ropes and all(isinstance(v, dict) for v in ropes.values())
    limits = []
    for rope in ropes.values() if by_layer_type else [ropes]:
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            own = rope.get("original_max_position_embeddings")
            limits.append(int(own or config.max_position_embeddings))
    return min(limits, default=None)


def require_known_packed(config: PreTrainedConfig, model: ModelConfig) -> None:
    """For engines with layers of their own. Raises ``ConfigError`` naming ``model.path`` unless it
    is one of ``ARCHITECTURES``, with attention as theirs is.
    """
    architecture = architecture_of(config)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model.path: {model.path} is a {architecture}, which cannot be split over processes; "
            f"supported are {', '.join(ARCHITECTURES)}; remove parallel to train others"
        )
    obstacles = {
        "sliding-window attention (sliding_window)": architecture != "LlamaForCausalLM"
        and sliding_window_of(config) is not None,
        "rotary frequencies that depend on lengths (rope_parameters)": rope_limit_of(config)
        is not None,
    }
    if found := [name for name, present in obstacles.items() if present]:
        raise ConfigError(
            f"model.path: {model.path} is a {architecture} with {' and '.join(found)}, which "
            "a model that is split over processes cannot have; remove parallel, or use a model "
            "without it"
        )


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


def _check_causal(config: PreTrainedConfig, model: ModelConfig) -> None:
    """A language model that transformers has a class for, and nothing but one."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model.path: {model.path} is a {architecture_of(config)}, which is no causal language "
            "model of transformers; give one (AutoModelForCausalLM)"
        )
    if config.get_text_config() is not config:
        raise ConfigError(
            f"model.path: {model.path} is a {architecture_of(config)}, of which text is one part "
            "of several; give a model of text alone"
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
