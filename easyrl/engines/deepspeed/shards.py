"""The tensors that DeepSpeed's optimizers step on a rank, and which parameters lie where in them.

Read in 0.19.8, kept to the bit by ``tests/easyrl/ledger/test_checkpoint_state.py``:

- ZeRO-0: the parameters themselves, whole on every rank.
- ZeRO-1 and 2 (``DeepSpeedZeroOptimizer``) and bf16 ZeRO-1 with fp32 accumulation
  (``BF16_Optimizer``): one flat partition per parameter group and rank; ``_hp_mapping`` of a
  parameter says which of its elements lie where.
- ZeRO-3: each parameter is cut into equal parts, one per rank, padded at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from easyrl.engines.base import Columns
from easyrl.engines.deepspeed.late_denominator import LateScalarOptimizer
from easyrl.runtime.ranks import Ranks


class Fragment(NamedTuple):
    """Elements ``[start, start + numel)`` of a flattened parameter, or of some flattened columns of
    it, at ``offset`` of another flattened tensor."""

    name: str
    start: int
    numel: int
    offset: int
    columns: Columns | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor that the optimizer steps on this rank."""

    name: str  # of the tensor: the parameter's with ZeRO-0, else of this rank's alone
    tensor: Tensor  # fp32; the optimizer's state is kept under it
    fragments: list[Fragment]  # held on this rank, offsets in the flattened tensor
    saved: list[Fragment]  # those of them that this rank saves
    ranks: Ranks  # whose data-parallel ones share the optimizer


def shards_of(optimizer: Any, parameters: Mapping[str, Any], ranks: Ranks) -> list[Shard]:
    """Of one of DeepSpeed's optimizers or ``LateScalarOptimizer``, with the trained parameters.

    ``ranks``: its data-parallel ones are those that share them.
    """
    if isinstance(optimizer, LateScalarOptimizer):
        whole = {n: Fragment(n, 0, p.numel(), 0) for n, p in parameters.items()}
        return [
            Shard(n, parameters[n], [fragment], [own_part(fragment, ranks)], ranks)
            for n, fragment in whole.items()
        ]
    placed = _placed_by_mapping(parameters)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        flats = optimizer.fp32_partitioned_groups_flat
        placed = _placed_by_zero_3(optimizer, parameters, ranks)
    elif isinstance(optimizer, BF16_Optimizer):
        flats = optimizer.fp32_groups_flat_partition
    else:
        assert isinstance(optimizer, DeepSpeedZeroOptimizer)
        flats = optimizer.single_partition_of_fp32_groups
    by_flat: list[list[Fragment]] = [[] for _ in flats]
    for index, fragment in placed:
        by_flat[index].append(fragment)
    return [
        Shard(f"partition-{index}-of-rank-{ranks.dp_rank}", flat, held, held, ranks)
        for index, (flat, held) in enumerate(zip(flats, by_flat, strict=True))
    ]


def own_part(fragment: Fragment, ranks: Ranks) -> Fragment:
    """What this rank saves of a fragment that all data-parallel ranks hold; may be empty."""
    first = fragment.numel * ranks.dp_rank // ranks.dp_size
    last = fragment.numel * (ranks.dp_rank + 1) // ranks.dp_size
    return fragment._replace(
        start=fragment.start + first, numel=last - first, offset=fragment.offset + first
    )


def zero_3_fragment(name: str, parameter: Any, offset: int, part: int, ranks: Ranks) -> Fragment:
    """This rank's part of a ZeRO-3 parameter without the padding; empty if it is all padding."""
    start = part * ranks.dp_rank
    return Fragment(name, start, min(part, parameter.ds_numel - start), offset)


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
    optimizer: DeepSpeedZeroOptimizer_Stage3, parameters: Mapping[str, Any], ranks: Ranks
) -> Iterator[tuple[int, Fragment]]:
    for name, parameter in parameters.items():
        index, offset, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
        fragment = zero_3_fragment(name, parameter, offset, part, ranks)
        if fragment.numel > 0:
            yield index, fragment
