"""Where DeepSpeed's optimizers keep fp32 weights and Adam's moments, told by parameter name.

Read in 0.19.8, kept to the bit by ``tests/easyrl/ledger/test_checkpoint_state.py``:

- ZeRO-0: the parameters are the masters, whole on every rank; each saves its part of each.
- ZeRO-1 and 2 (``DeepSpeedZeroOptimizer``) and bf16 ZeRO-1 with fp32 accumulation
  (``BF16_Optimizer``): one flat partition per parameter group and rank; ``_hp_mapping`` of a
  parameter says which of its elements lie where.
- ZeRO-3: each parameter is cut into equal parts, one per rank, padded at the end.

The weights in the model's dtype are always a copy of the masters, so they are not saved. What is
saved has a parameter's name and its place in the whole flattened parameter, so that any other
number of ranks finds what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from easyrl.engines.base import SavedState, StatePiece
from easyrl.engines.deepspeed.late_denominator import LateScalarAdamW

MASTER, STEP = "master", "step"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Fragment(NamedTuple):
    """Elements ``[start, start + numel)`` of a flattened parameter, at ``offset`` of another
    flattened tensor."""

    name: str
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor that AdamW steps on this rank."""

    tensor: Tensor  # fp32; AdamW's state is kept under it
    fragments: list[Fragment]  # held on this rank, offsets in the flattened tensor
    saved: list[Fragment]  # those of them that this rank saves


def copy_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def restore(tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Writes ``saved`` into ``tensors``, to the bit."""
    for tensor, value in zip(tensors, saved, strict=True):
        assert tensor.shape == value.shape and tensor.dtype == value.dtype
        tensor.copy_(value)


def optimizer_pieces(optimizer: Any, parameters: Mapping[str, Any]) -> Iterator[StatePiece]:
    """Copies of this rank's share of masters, moments and step counts.

    Before the first step there are only masters.
    """
    adam = _adam(optimizer)
    for shard in _shards(optimizer, parameters):
        yield from copy_pieces(MASTER, shard.tensor, shard.saved)
        if not (state := adam.state.get(shard.tensor)):
            continue
        for kind in MOMENTS:
            yield from copy_pieces(kind, state[kind], shard.saved)
        count = state["step"].detach().float().cpu().reshape(1)
        for fragment in shard.saved:
            if fragment.start == 0 and fragment.numel > 0:
                yield StatePiece(key_of(STEP, fragment.name), 0, count.clone())


@torch.no_grad()
def restore_optimizer(optimizer: Any, parameters: Mapping[str, Any], saved: SavedState) -> None:
    """Writes masters, moments and step counts, then the model's weights from the masters.

    Collective. Raises ``ValueError`` where the checkpoint does not fit.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()  # nothing gathered
    adam = _adam(optimizer)
    for shard in _shards(optimizer, parameters):
        read_pieces(MASTER, shard.tensor, shard.fragments, saved)
        count = _step_count(shard, saved)
        if count == 0:
            adam.state.pop(shard.tensor, None)
            continue
        state = adam.state[shard.tensor]
        if not state:
            state.update(_fresh_state(adam, shard.tensor))
        state["step"].fill_(count)
        for kind in MOMENTS:
            read_pieces(kind, state[kind], shard.fragments, saved)
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


def own_part(fragment: Fragment, rank: int, num_ranks: int) -> Fragment:
    """What ``rank`` saves of a fragment that all ranks hold; may be empty."""
    first = fragment.numel * rank // num_ranks
    last = fragment.numel * (rank + 1) // num_ranks
    return fragment._replace(
        start=fragment.start + first, numel=last - first, offset=fragment.offset + first
    )


def copy_pieces(kind: str, tensor: Tensor, fragments: Sequence[Fragment]) -> Iterator[StatePiece]:
    """Copies in host memory of the fragments of ``tensor``."""
    flat = tensor.detach().view(-1)
    for name, start, numel, offset in fragments:
        if numel > 0:
            values = flat[offset : offset + numel].to("cpu", copy=True)
            yield StatePiece(key_of(kind, name), start, values)


def read_pieces(
    kind: str, tensor: Tensor, fragments: Sequence[Fragment], saved: SavedState
) -> None:
    """Inverse of ``copy_pieces``. Raises ``ValueError`` for another dtype."""
    flat = tensor.detach().view(-1)
    for name, start, numel, offset in fragments:
        values = saved.read(key_of(kind, name), start, numel)
        if values.dtype != flat.dtype:
            raise ValueError(
                f"{key_of(kind, name)} is {values.dtype} in the checkpoint, here {flat.dtype}"
            )
        flat[offset : offset + numel].copy_(values)


def key_of(kind: str, name: str) -> str:
    """Of a tensor in the checkpoint."""
    return f"{kind}/{name}"


def _shards(optimizer: Any, parameters: Mapping[str, Any]) -> list[Shard]:
    if isinstance(optimizer, LateScalarAdamW):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        whole = {n: Fragment(n, 0, p.numel(), 0) for n, p in parameters.items()}
        return [
            Shard(parameters[n], [fragment], [own_part(fragment, rank, num_ranks)])
            for n, fragment in whole.items()
        ]
    placed = _placed_by_mapping(parameters)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        flats = optimizer.fp32_partitioned_groups_flat
        placed = _placed_by_zero_3(optimizer, parameters)
    elif isinstance(optimizer, BF16_Optimizer):
        flats = optimizer.fp32_groups_flat_partition
    else:
        assert isinstance(optimizer, DeepSpeedZeroOptimizer)
        flats = optimizer.single_partition_of_fp32_groups
    by_flat: list[list[Fragment]] = [[] for _ in flats]
    for index, fragment in placed:
        by_flat[index].append(fragment)
    return [Shard(flat, held, held) for flat, held in zip(flats, by_flat, strict=True)]


def _placed_by_mapping(parameters: Mapping[str, Any]) -> Iterator[tuple[int, Fragment]]:
    """ZeRO 1 and 2: which flat tensor a fragment is in, and where."""
    for name, parameter in parameters.items():
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it on other ranks
            continue
        whole, here = mapping.lp_fragment_address, mapping.hp_fragment_address
        fragment = Fragment(name, whole.start, here.numel, here.start)
        yield mapping.param_group_index, fragment


def _placed_by_zero_3(
    optimizer: DeepSpeedZeroOptimizer_Stage3, parameters: Mapping[str, Any]
) -> Iterator[tuple[int, Fragment]]:
    for name, parameter in parameters.items():
        index, offset, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
        fragment = zero_3_fragment(name, parameter, offset, part)
        if fragment.numel > 0:
            yield index, fragment


def zero_3_fragment(name: str, parameter: Any, offset: int, part: int) -> Fragment:
    """This rank's part of a ZeRO-3 parameter without the padding; empty if it is all padding."""
    start = part * dist.get_rank()
    return Fragment(name, start, min(part, parameter.ds_numel - start), offset)


def _adam(optimizer: Any) -> torch.optim.AdamW:
    inner = optimizer if isinstance(optimizer, LateScalarAdamW) else optimizer.optimizer
    assert isinstance(inner, torch.optim.AdamW)
    return inner


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


def _fresh_state(adam: torch.optim.AdamW, tensor: Tensor) -> dict[str, Tensor]:
    """As AdamW makes it at the first step of ``tensor``."""
    on_device = adam.defaults["fused"] or adam.defaults["capturable"]
    step = torch.zeros((), dtype=torch.float32, device=tensor.device if on_device else "cpu")
    return {STEP: step} | {kind: torch.zeros_like(tensor) for kind in MOMENTS}


def _copy_masters_to_model(optimizer: Any) -> None:
    """As at the end of each optimizer's step."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # gathers again what always is
    elif not isinstance(optimizer, LateScalarAdamW):
        optimizer.update_lp_params()
