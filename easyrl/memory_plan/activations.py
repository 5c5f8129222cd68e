"""Bytes of activations: what a decoder layer keeps for its backward, and what the head needs.

Counted from the tensors that autograd keeps of our layers as Hugging Face and megatron-core compute
them, not fused (``model.fused_layers`` keeps less). Kept by
``tests/easyrl/memory_plan/test_measured_memory.py``, which lets real engines run.

Shape legend: T tokens of a row, N of them trained, H hidden size, V vocabulary, C positions of a
chunk of the projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from easyrl.engines.deepspeed.memory import WEIGHT
from easyrl.kernels.logprobs.chunk_size import default_chunk_size
from easyrl.kernels.logprobs.projection import WEIGHT_ROWS
from easyrl.kernels.logprobs.vocab_softmax import BLOCK_NUMEL, DEVICE_BLOCK_NUMEL
from easyrl.memory_plan.model_shape import ModelShape

WIDE = 4  # bytes of fp32, in which norms and the softmax are computed
# of attention per token: one of its own segment, one of what segments share (``merged``)
ATTENTION_RESULTS = 2
MLP_GRADIENTS = 2  # of the MLP's features, alive together in a layer's backward
CPU, ACCELERATOR = torch.device("cpu"), torch.device("meta")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Sharing:
    """How tensor-parallel ranks share activations, and whose layers they are."""

    tensor: int = 1
    sequence: bool = False
    megatron: bool = False  # megatron-core's layers, else Hugging Face's

    @property
    def hidden(self) -> float:
        """A rank's share of tensors of the hidden size between the matrices."""
        return 1 / self.tensor if self.sequence else 1.0


@dataclass(frozen=True)
class LayerBytes:
    """Of one token in one decoder layer, on one rank."""

    everything: float  # that autograd keeps where nothing is computed again
    entry: float  # the layer's input
    products: float  # results of matrix products and attention
    reused: float  # of them what autograd keeps anyway
    gradients: float  # beside what is kept, in the backward
    forward: float  # without gradient, at its widest

    def kept(self, mode: Literal["none", "layer", "selective"]) -> float:
        """From the forward to the backward."""
        match mode:
            case "none":
                return self.everything
            case "layer":
                return self.entry
            case "selective":
                return self.entry + self.products

    def again(self, mode: Literal["none", "layer", "selective"]) -> float:
        """Beside what is kept, of a layer whose backward runs: what has been computed again."""
        match mode:
            case "none":
                return 0.0
            case "layer":
                return self.everything
            case "selective":
                return self.everything - self.reused


def layer_bytes(shape: ModelShape, dtype: Literal["bf16", "fp32"], sharing: Sharing) -> LayerBytes:
    """``shape``: of the model."""
    size, hidden = WEIGHT[dtype], shape.hidden
    # a norm keeps its input in fp32 and its result before the weight; a matrix keeps its input
    norms = 2 * (WIDE + size + size) * hidden
    if experts := shape.experts_per_token:  # each token's copies, before and behind its experts
        norms += 3 * experts * size * hidden
    logsumexps = WIDE * shape.query_heads
    attention = size * 2 * (shape.queries + shape.keys) + logsumexps
    # the inputs of norms of heads are the projections as they are, where they need no copy in fp32
    keeps_keys = dtype == "fp32" and shape.has_head_norms
    if shape.has_head_norms:
        attention += (WIDE + size) * (shape.queries + shape.keys)
    mlp = 4 * size * shape.mlp  # gate, its activation, up, their product
    if sharing.megatron:  # ``up`` once more; queries and keys, of which values are a view
        mlp += size * shape.mlp
        attention += size * (shape.queries + (0 if keeps_keys else shape.keys))
    results = ATTENTION_RESULTS * (size * shape.queries + logsumexps)
    projections = size * (shape.queries + 2 * shape.keys + 2 * shape.mlp)
    reused = size * (shape.keys + 2 * shape.mlp)  # values, gate, up
    if keeps_keys:
        reused += size * (shape.queries + shape.keys)
    return LayerBytes(
        everything=norms * sharing.hidden + (attention + mlp) / sharing.tensor,
        entry=size * hidden * sharing.hidden,
        products=2 * size * hidden + (projections + results) / sharing.tensor,
        reused=reused / sharing.tensor,
        gradients=MLP_GRADIENTS * size * shape.mlp / sharing.tensor,
        forward=size * (2 * hidden + (5 if sharing.megatron else 4) * shape.mlp / sharing.tensor),
    )


def head_bytes(
    shape: ModelShape,
    dtype: Literal["bf16", "fp32"],
    sharing: Sharing,
    num_tokens: int,
    *,
    chunk_size: int | None,
    on_cpu: bool,
    is_trained: bool = True,
) -> float:
    """Of the last norm and the projection to the vocabulary at their peak, all T tokens trained.

    The weight's gradient is summed in fp32 and rounded once. It is there beside a chunk's logits,
    and then beside its rounded copy. ``is_trained``: False below adapters, where there is none.
    """
    size, hidden = WEIGHT[dtype], shape.hidden
    rows = -(-shape.vocabulary // sharing.tensor)
    norm = (WIDE + size) * hidden * sharing.hidden * num_tokens
    if sharing.sequence:
        norm += size * hidden * num_tokens  # gathered
    predictors = 2 * size * hidden * num_tokens  # and their gradient
    gradient = WIDE * rows * hidden if is_trained else 0
    chunk = min(num_tokens, chunk_size or _default_chunk(dtype, rows, on_cpu))
    block = BLOCK_NUMEL if on_cpu else DEVICE_BLOCK_NUMEL
    logits = size * chunk * rows + 2 * WIDE * min(block, chunk * rows // 2)
    if dtype == "bf16":  # of the rounded products that are added to the gradient
        logits += size * min(WEIGHT_ROWS, rows) * hidden
    rounded = 0 if dtype == "fp32" or not is_trained else size * rows * hidden
    return norm + predictors + gradient + max(logits, rounded)


def _default_chunk(dtype: Literal["bf16", "fp32"], rows: int, on_cpu: bool) -> int:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    return default_chunk_size(
        torch.empty(0, dtype=kind, device=CPU if on_cpu else ACCELERATOR), rows
    )
