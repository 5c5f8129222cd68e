"""Section ``model``: the policy, its attention, activation checkpointing and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from easyrl.config.base import FilePath, Section


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): only they are trained, the model itself is frozen."""

    rank: PositiveInt = 16  # columns of each adapter's first factor
    alpha: PositiveFloat = 32.0  # the adapters' product is scaled by alpha / rank
    target_modules: Annotated[list[str], Field(min_length=1)] = [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]  # names of linear layers


Attention = Literal["auto", "reference", "padded", "merged", "flex", "varlen", "npu", "own"]


class ModelConfig(Section):
    """The policy, a Hugging Face causal language model on disk."""

    path: FilePath  # folder with config.json, safetensors files and tokenizer
    tokenizer: FilePath | None = None  # default: path
    dtype: Literal["bf16", "fp32"] = "bf16"  # of weights and activations; gradients, masters and
    # moments are fp32 in either
    attention: Attention = "auto"  # of packed rows; auto: the fastest that the device has for a
    # row; own: the model's, on a padded batch, for models whose attention cannot be replaced (only
    # with trainer.packing of none or auto)
    fused_layers: Literal["auto", "cpu", "liger", "npu", "none"] = "auto"  # of RMSNorm, rotary
    # embedding and SwiGLU; auto: cpu (the first two) on a CPU, liger on CUDA, npu on Ascend, where
    # they agree with the plain layers
    activation_checkpointing: Literal["auto", "none", "layer", "selective"] = "auto"  # what is
    # computed again in the backward pass: nothing, whole decoder layers, or all of them but matrix
    # products and attention; auto: selective in bf16, none in fp32
    checkpoint_every: PositiveInt = 1  # n: every n-th decoder layer only
    logprob_chunk_size: PositiveInt | None = None  # positions projected to the vocabulary at a
    # time; default: by device and vocabulary
    logprob_backward: Literal["auto", "same_pass", "recompute"] = "auto"  # auto: the gradient of
    # the projection is formed with its values where the recipe's loss is a sum over tokens
    ignore_router_aux_loss: bool = False  # trains a mixture of experts whose config.json asks for
    # the router's load-balancing loss without it; else such a model is refused
    lora: LoraConfig | None = None  # adapters that are trained in place of the model; default: none

    @property
    def recomputed(self) -> Literal["none", "layer", "selective"]:
        """``activation_checkpointing`` with ``auto`` decided."""
        if self.activation_checkpointing != "auto":
            return self.activation_checkpointing
        return "selective" if self.dtype == "bf16" else "none"

    @property
    def tokenizer_path(self) -> Path:
        return self.tokenizer or self.path
