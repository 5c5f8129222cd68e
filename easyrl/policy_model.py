"""A Hugging Face causal language model, run on packed rows, with a log-probability head.

The model itself is not rewritten: its attention is ours through transformers'
``AttentionInterface``, and its ``lm_head`` becomes a ``LogprobHead`` over the same parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import AttentionInterface

from easyrl.config import ModelConfig
from easyrl.kernels.linear_logprob import linear_logprobs
from easyrl.kernels.shared_prompt_attention import SegmentLayout, shared_prompt_attention
from easyrl.numerics import own_memory
from easyrl.schema import MicroBatch

ATTENTION = "easyrl_shared_prompt"
SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# Frequencies that depend on a forward's longest sequence: a row's groups would change each other.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: SegmentLayout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; ``layout`` comes through the model's keywords."""
    assert layout is not None and attention_mask is None, "run this model through PolicyModel"
    output = shared_prompt_attention(query, key, value, layout, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


class LogprobHead(nn.Module):
    """The output projection as log-probabilities of labels.

    A module of its own, because ZeRO-3 gathers a weight around the forward of the module that owns
    it. It takes over the projection's parameters, so a tied weight stays one object.
    """

    def __init__(self, projection: nn.Linear, chunk_size: int) -> None:
        super().__init__()
        self.weight = projection.weight
        self.bias: nn.Parameter | None = projection.bias
        self.chunk_size = chunk_size

    def forward(
        self, hidden: Tensor, label_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, float32 [N]; ``hidden`` [N, H], ``label_ids`` [N]."""
        return linear_logprobs(
            hidden,
            self.weight,
            label_ids,
            bias=self.bias,
            temperature=temperature,
            chunk_size=self.chunk_size,
        )


class PolicyModel(nn.Module):
    """Packed row in, log-probability and entropy of each trained token out.

    The Hugging Face model is ``self.model``: a parameter's name there is its name here without the
    leading ``model.``.
    """

    def __init__(self, model: PreTrainedModel, logprob_chunk_size: int) -> None:
        super().__init__()
        assert model.config._attn_implementation == ATTENTION
        self.model = model
        self.model.set_output_embeddings(
            LogprobHead(model.get_output_embeddings(), logprob_chunk_size)
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SegmentLayout,
        predictor_index: Tensor,
        label_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, float32 [N], at ``temperature``.

        ``input_ids`` and ``position_ids`` int64 [T] are the row, ``layout`` its segments; token
        ``label_ids[n]`` is predicted at position ``predictor_index[n]``, both int64 [N].
        """
        hidden = self.model.base_model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]  # [T, H]
        head = self.model.get_output_embeddings()
        return head(hidden.index_select(0, predictor_index), label_ids, temperature)


def run_micro_batch(
    model: nn.Module,
    micro_batch: MicroBatch,
    temperature: float,
    *,
    layout: SegmentLayout | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """``PolicyModel.forward`` of ``micro_batch``; ``model`` may be an engine around the model.

    Models that see the same row share its ``layout`` and with it the mask. Tensors move to
    ``device`` if given.
    """
    return model(
        micro_batch.input_ids.to(device),
        micro_batch.position_ids.to(device),
        layout or SegmentLayout(micro_batch.segments),
        micro_batch.predictor_index.to(device),
        micro_batch.label_ids.to(device),
        temperature,
    )


def load_policy_model(model: ModelConfig, *, dtype: torch.dtype | None = None) -> PolicyModel:
    """The model at ``model.path`` in training mode, in ``dtype`` (default: ``model.dtype``'s).

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
    # The name that every transformers 5 knows; late ones call it activation checkpointing.
    if model.gradient_checkpointing:
        hf_model.gradient_checkpointing_enable({"use_reentrant": False})
    # No dropout in these models: training mode only switches gradient checkpointing on.
    return PolicyModel(hf_model, model.logprob_chunk_size).train()


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
