"""A rank's part of the policy behind DeepSpeed: data-parallel sharding, clip, step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from megatron.core import parallel_state
from torch import Tensor, nn

from easyrl.config import Config
from easyrl.engines.deepspeed.initialise import initialise
from easyrl.engines.megatron.mpu import ModelParallelUnit
from easyrl.engines.megatron.stage import PolicyStage


class Chunks(nn.Module):
    """All chunks of layers of a pipeline stage, as one module to DeepSpeed. With a single one it
    is run through this."""

    def __init__(self, chunks: list[PolicyStage]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def forward(self, *arguments: Any) -> Any:
        """Of the only chunk."""
        (chunk,) = self.chunks
        return chunk(*arguments)


def initialise_chunks(
    config: Config, chunks: list[PolicyStage], factor: Callable[[int], float]
) -> deepspeed.DeepSpeedEngine:
    """``factor``: of the learning rate, by optimizer step. Collective."""
    for copy in copied_embeddings(chunks):
        copy.ds_pipe_replicated = True  # DeepSpeed: not counted in the norm
    return initialise(config, Chunks(chunks), factor, ModelParallelUnit())


def copied_embeddings(chunks: list[PolicyStage]) -> Iterator[Any]:
    """The last stage's copy of a tied embedding."""
    for chunk in chunks:
        if chunk.tied and chunk.is_last and not chunk.is_first:
            yield chunk.output_layer.weight


def sum_tied_embeddings(engine: deepspeed.DeepSpeedEngine, chunks: list[PolicyStage]) -> None:
    """The gradient of an embedding that the first and the last stage have, in both: their sum.

    Collective over the first and the last stage; without effect elsewhere.
    """
    for chunk in chunks:
        if not chunk.tied or chunk.is_first == chunk.is_last:
            continue
        weight = chunk.shared_embedding_or_output_weight()
        gradient = _accumulated(engine, weight)
        dist.all_reduce(gradient, group=parallel_state.get_embedding_group())


def _accumulated(engine: deepspeed.DeepSpeedEngine, parameter: Any) -> Tensor:
    """The gradient that DeepSpeed will reduce and step with."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):  # fp32, added to as soon as a bf16 one is there
        for index, group in enumerate(optimizer.bf16_groups):
            for place, other in enumerate(group):
                if other is parameter:
                    found: Tensor = optimizer.fp32_groups_gradients[index][place]
                    return found
        raise AssertionError("a parameter that is not trained")
    assert parameter.grad is not None
    gradient: Tensor = parameter.grad
    return gradient
