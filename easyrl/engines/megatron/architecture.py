"""megatron-core's description of a Hugging Face model: its configuration, and its layers' parts."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from easyrl.config import ConfigError
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.modules import HeadRMSNorm, RMSNorm, SharedPromptAttention
from easyrl.engines.megatron.weights.mapping import LAYERS

WITH_QKV_BIAS, WITH_QK_NORMS = {"Qwen2ForCausalLM"}, {"Qwen3ForCausalLM"}


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


def transformer_config(
    config: PreTrainedConfig, layout: Layout, dtype: torch.dtype
) -> TransformerConfig:
    """Raises ``ConfigError`` naming the key of ``parallel`` that does not fit the model."""
    name = architecture_of(config)
    _check_sizes(config, layout)
    settings: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_size(config),
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": name in WITH_QKV_BIAS,
        "qk_layernorm": name in WITH_QK_NORMS,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # without experts; the default is refused
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.chunks > 1:
        settings["virtual_pipeline_model_parallel_size"] = layout.chunks
        # In one batch with both neighbours the same process (two stages), activations and gradients
        # would be taken for each other.
        settings["batch_p2p_comm"] = False
    return TransformerConfig(**settings)


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Of each layer: megatron-core's own, but for normalisation and core attention."""
    head_norm = HeadRMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.arbitrary},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=SharedPromptAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_submodules(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """Of a stage of ``num_layers``, with our final normalisation."""
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(config)] * num_layers, layer_norm=RMSNorm
    )


def head_size(config: PreTrainedConfig) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _check_sizes(config: PreTrainedConfig, layout: Layout) -> None:
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
    stages = layout.pipeline * layout.chunks
    if config.num_hidden_layers % stages:
        raise ConfigError(
            f"parallel.pipeline: {config.num_hidden_layers} layers cannot be shared evenly by "
            f"{stages} stages; set parallel.layers_per_stage"
        )
