"""Bytes per trained parameter that DeepSpeed holds on one rank, by ZeRO stage, dtype and ranks.

Read in 0.19.8 with our settings (``config.py``): fp32 master weights, the optimizer's state,
gradients accumulated in fp32. Kept by ``tests/easyrl/engines/test_engine_memory.py``, which adds up
the tensors of real engines. It is what a rank holds between the last backward and the optimizer
step, without activations, without buffers of constant size (``BUFFERED``) and without frozen
models: a reference or an old policy is ``weights`` once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from easyrl.engines.deepspeed.config import REDUCE_BUCKET

MASTER, GRADIENT = 4, 4  # fp32
# Kingma and Ba 2014's two moments in fp32; in 8 bits with an fp32 scale for 256 of each; Muon's
# momentum, of the matrices that it steps (of the other parameters AdamW's moments)
MOMENTS = {"adamw": 8, "adam8bit": 2 + 2 * 4 / 256, "muon": 4}
WEIGHT = {"bf16": 2, "fp32": 4}
# In bytes at most, while gradients are reduced: a bucket in the weights' dtype and one in fp32.
BUFFERED = REDUCE_BUCKET * (4 + 4)


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """One rank's; of a parameter of the whole model."""

    weights: float
    gradients: float
    optimizer: float  # master weights, where they are not the weights, and moments
    host: float  # page-locked memory beside the device's

    @property
    def device(self) -> float:
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(
    zero_stage: Literal[0, 1, 2, 3],
    dtype: Literal["bf16", "fp32"],
    num_ranks: int,
    *,
    offload_optimizer: bool = False,
    optimizer: Literal["adamw", "adam8bit", "muon"] = "adamw",
) -> BytesPerParameter:
    """What ``num_ranks`` data-parallel ranks share, each holds ``1 / num_ranks`` of."""
    weight, share, moments = WEIGHT[dtype], 1 / num_ranks, MOMENTS[optimizer]
    if zero_stage == 0:  # fp32 alone; the weights are their own masters
        return BytesPerParameter(weight, GRADIENT, moments, 0)
    weights = weight * share if zero_stage == 3 else weight
    gradients = GRADIENT if zero_stage == 1 else GRADIENT * share
    state = (MASTER + moments) * share
    if not offload_optimizer:
        return BytesPerParameter(weights, gradients, state, 0)
    # The gradients that AdamW steps on, and a copy of the new weights on their way to the device or
    # (ZeRO-3, and ZeRO-2 in fp32) the gradients that are accumulated on the host.
    host = state + GRADIENT * share
    if zero_stage < 3:
        host += weight * share
    if zero_stage == 3 or (zero_stage == 2 and dtype == "fp32"):
        host += GRADIENT * share
        gradients = 0
    return BytesPerParameter(weights, gradients, 0, host)
