"""megatron-core's description of a Hugging Face model: its configuration, and its layers' parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear
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

from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.modules import (
    HeadRMSNorm,
    OutputProjection,
    RMSNorm,
    SharedPromptAttention,
)
from easyrl.engines.megatron.splittable import WITH_QKV_BIAS, architecture_of, check_sizes

WITH_QK_NORMS = {"Qwen3ForCausalLM"}


def transformer_config(
    config: PreTrainedConfig, layout: Layout, dtype: torch.dtype
) -> TransformerConfig:
    """Raises ``ConfigError`` naming the key of ``parallel`` that does not fit the model."""
    name = architecture_of(config)
    check_sizes(config, layout)
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
    if layout.layers_per_stage is not None:
        settings["pipeline_model_parallel_layout"] = _parts_of_stages(layout.layers_per_stage)
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
            linear_proj=OutputProjection,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=OutputProjection),
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


def _parts_of_stages(layers_per_stage: Sequence[int]) -> list[list[str]]:
    """megatron-core's names of what each pipeline stage has."""
    stages = [["decoder"] * number for number in layers_per_stage]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def head_size(config: PreTrainedConfig) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)
