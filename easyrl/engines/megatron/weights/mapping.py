"""Which Hugging Face tensors each parameter of megatron-core's ``GPTModel`` is made of.

The tables can be checked by eye: on the left megatron-core's name, then Hugging Face's tensors,
then how tensor-parallel ranks share them (``Split``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Split(Enum):
    """How the ranks of a tensor-parallel group share a parameter."""

    WHOLE = auto()  # each rank has all of it
    ROWS = auto()  # consecutive rows; a vocabulary is padded to a multiple of the ranks
    COLUMNS = auto()  # consecutive columns
    EACH_ROWS = auto()  # consecutive rows of each tensor, one tensor's behind the other's
    BY_KV_GROUP = auto()  # query, key and value heads interleaved by key-value head, then rows


@dataclass(frozen=True)
class Rule:
    """A parameter, what it is made of, and how it is split."""

    parameter: str
    tensors: tuple[str, ...]
    split: Split


def _rule(parameter: str, tensors: str, split: Split) -> Rule:
    return Rule(parameter, tuple(tensors.split(" + ")), split)


# In decoder.layers.N there, in model.layers.N here.
LAYER = (
    _rule("input_layernorm.weight", "input_layernorm.weight", Split.WHOLE),
    _rule(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight + self_attn.k_proj.weight + self_attn.v_proj.weight",
        Split.BY_KV_GROUP,
    ),
    _rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Split.COLUMNS),
    _rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Split.WHOLE),
    _rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight + mlp.up_proj.weight", Split.EACH_ROWS),
    _rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", Split.COLUMNS),
)
QKV_BIAS = _rule(
    "self_attention.linear_qkv.bias",
    "self_attn.q_proj.bias + self_attn.k_proj.bias + self_attn.v_proj.bias",
    Split.BY_KV_GROUP,
)
QK_NORMS = (
    _rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", Split.WHOLE),
    _rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", Split.WHOLE),
)
LAYERS = {
    "LlamaForCausalLM": LAYER,
    "MistralForCausalLM": LAYER,
    "Qwen2ForCausalLM": (*LAYER, QKV_BIAS),
    "Qwen3ForCausalLM": (*LAYER, *QK_NORMS),
}
EMBEDDING = _rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", Split.ROWS)
FINAL_NORM = _rule("decoder.final_layernorm.weight", "model.norm.weight", Split.WHOLE)
HEAD = _rule("output_layer.weight", "lm_head.weight", Split.ROWS)
TIED_HEAD = _rule("output_layer.weight", "model.embed_tokens.weight", Split.ROWS)


def rules(architecture: str, num_layers: int, *, tied: bool) -> dict[str, Rule]:
    """Of a whole model, by the parameter's name, layers numbered from the model's first.

    ``tied``: input and output embedding are one tensor; where the last pipeline stage is not the
    first it has a copy.
    """
    of_layers = [
        Rule(
            f"decoder.layers.{layer}.{rule.parameter}",
            tuple(f"model.layers.{layer}.{tensor}" for tensor in rule.tensors),
            rule.split,
        )
        for layer in range(num_layers)
        for rule in LAYERS[architecture]
    ]
    every = [EMBEDDING, *of_layers, FINAL_NORM, TIED_HEAD if tied else HEAD]
    return {rule.parameter: rule for rule in every}
