"""fp32 weights and the optimizer's state in a checkpoint, told by parameter name.

The weights in the model's dtype are always a copy of the masters, so they are not saved. What is
saved has a parameter's name and its place in the whole flattened parameter, so that any other
number of ranks finds what it needs; 8-bit moments are the exception (``eight_bit.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from easyrl.engines.base import SavedState, StatePiece
from easyrl.engines.deepspeed.eight_bit import is_eight_bit, quantised_pieces, restore_quantised
from easyrl.engines.deepspeed.late_denominator import LateScalarOptimizer
from easyrl.engines.deepspeed.muon import MOMENTUM, MuonWithAdamW, fresh_muon_state
from easyrl.engines.deepspeed.pieces import MASTER, STEP, copy_pieces, key_of, read_pieces
from easyrl.engines.deepspeed.shards import Fragment, Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


def copy_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def restore(tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Writes ``saved`` into ``tensors``, to the bit."""
    for tensor, value in zip(tensors, saved, strict=True):
        assert tensor.shape == value.shape and tensor.dtype == value.dtype
        tensor.copy_(value)


def optimizer_pieces(optimizer: Any, shards: Sequence[Shard]) -> Iterator[StatePiece]:
    """Copies of this rank's share of masters, moments or momentum, and step counts.

    Before the first step there are only masters. ``shards`` are the optimizer's.
    """
    inner: torch.optim.Optimizer = optimizer.optimizer
    for shard in shards:
        yield from copy_pieces(MASTER, shard.tensor, shard.saved)
        if not (state := inner.state.get(shard.tensor)):
            continue
        if is_eight_bit(inner):
            yield from quantised_pieces(shard, state)
            continue
        for kind in _kinds(inner, shard.tensor):
            yield from copy_pieces(kind, state[kind], shard.saved)
        count = state["step"].detach().float().cpu().reshape(1)
        for fragment in shard.saved:
            if _has_first_element(fragment):
                yield StatePiece(key_of(STEP, fragment.name), 0, count.clone())


@torch.no_grad()
def restore_optimizer(optimizer: Any, shards: Sequence[Shard], saved: SavedState) -> None:
    """Writes masters, the optimizer's state, then the model's weights from the masters.

    Collective. Raises ``ValueError`` where the checkpoint does not fit.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()  # nothing gathered
    inner: torch.optim.Optimizer = optimizer.optimizer
    for shard in shards:
        read_pieces(MASTER, shard.tensor, shard.fragments, saved)
        if is_eight_bit(inner):
            restore_quantised(inner, shard, saved)
        else:
            _restore_elementwise(inner, shard, saved)
    _copy_masters_to_model(optimizer)


def restore_schedule(scheduler: Any, position: int) -> None:
    """The schedule and the optimizer's learning rates as after ``position`` steps."""
    assert isinstance(scheduler, LambdaLR)
    scheduler.last_epoch = position
    scheduler._step_count = position + 1
    rates = [
        base * factor(position)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _restore_elementwise(inner: torch.optim.Optimizer, shard: Shard, saved: SavedState) -> None:
    count = _step_count(shard, saved)
    if count == 0:
        inner.state.pop(shard.tensor, None)
        return
    state = inner.state[shard.tensor]
    if not state:
        state.update(_fresh_state(inner, shard.tensor))
    state["step"].fill_(count)
    for kind in _kinds(inner, shard.tensor):
        read_pieces(kind, state[kind], shard.fragments, saved)


def _step_count(shard: Shard, saved: SavedState) -> float:
    """Steps that all parameters of ``shard`` have taken."""
    keys = [key_of(STEP, fragment.name) for fragment in shard.fragments]
    counts = {float(saved.read(key, 0, 1)) if saved.numel(key) else 0.0 for key in keys}
    if len(counts) > 1:
        raise ValueError(
            "some parameters have taken more optimizer steps than others, which a flat partition "
            "cannot say; resume with trainer.zero_stage=0"
        )
    return counts.pop() if counts else 0.0


def _has_first_element(fragment: Fragment) -> bool:
    """Of the whole tensor: one rank tells its step count."""
    left = 0 if fragment.columns is None else fragment.columns.first
    return fragment.start == 0 and left == 0 and fragment.numel > 0


def _kinds(inner: torch.optim.Optimizer, tensor: Tensor) -> tuple[str, ...]:
    """What the optimizer keeps of each element of ``tensor``."""
    is_muon = isinstance(inner, MuonWithAdamW) and inner.is_muon(tensor)
    return (MOMENTUM,) if is_muon else MOMENTS


def _fresh_state(inner: torch.optim.Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """As the optimizer makes it at the first step of ``tensor``."""
    if isinstance(inner, MuonWithAdamW):
        if inner.is_muon(tensor):
            return fresh_muon_state(tensor)
        assert inner.adamw is not None
        inner = inner.adamw
    on_device = inner.defaults["fused"] or inner.defaults["capturable"]
    step = torch.zeros((), dtype=torch.float32, device=tensor.device if on_device else "cpu")
    return {STEP: step} | {kind: torch.zeros_like(tensor) for kind in MOMENTS}


def _copy_masters_to_model(optimizer: Any) -> None:
    """As at the end of each optimizer's step."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # gathers again what always is
    elif not isinstance(optimizer, LateScalarOptimizer):
        optimizer.update_lp_params()
