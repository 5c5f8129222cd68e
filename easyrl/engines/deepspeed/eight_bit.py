"""AdamW with moments in 8 bits (Dettmers et al. 2021, arXiv 2110.02861), and its saved state.

bitsandbytes quantises each tensor that it steps in blocks of 256 numbers, each with an fp32 scale.
With ZeRO these tensors are a rank's flat partitions, whose blocks do not end where parameters do:
what is saved is the quantised state as it lies there, for the same ZeRO stage and number of ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from easyrl.config import ConfigError
from easyrl.engines.base import SavedState, StatePiece
from easyrl.engines.deepspeed.pieces import STEP, copy_pieces, key_of, read_pieces
from easyrl.engines.deepspeed.shards import Fragment, Shard, own_part

# Codes, scales. Tensors of fewer than 4096 elements have fp32 moments in their place, no scales.
CODES, SCALES = ("state1", "state2"), ("absmax1", "absmax2")


def eight_bit_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """bitsandbytes' ``AdamW8bit``. Raises ``ConfigError`` where it is not installed."""
    try:
        optimizers = importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise ConfigError(
            f"trainer.optimizer: adam8bit needs bitsandbytes ({error}); pip install "
            "'easyrl[adam8bit]', or use adamw"
        ) from error
    optimizer: torch.optim.Optimizer = optimizers.AdamW8bit(groups, **settings)
    return optimizer


def is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "bitsandbytes"


def partitions_of(zero_stage: int, num_ranks: int) -> str:
    """What the blocks of a saved state belong to."""
    return "parameters" if zero_stage == 0 else f"ZeRO {zero_stage} on {num_ranks} ranks"


def quantised_pieces(shard: Shard, state: dict[str, Any]) -> Iterator[StatePiece]:
    """Copies of this rank's share of the state of ``shard``."""
    for kind in (*CODES, *SCALES):
        if kind in state:
            yield from copy_pieces(kind, state[kind], [_own(shard, state[kind].numel())])
    if not _is_replicated(shard) or shard.ranks.dp_rank == 0:
        yield StatePiece(key_of(STEP, shard.name), 0, torch.tensor([float(state["step"])]))


def restore_quantised(optimizer: torch.optim.Optimizer, shard: Shard, saved: SavedState) -> None:
    """Raises ``ValueError`` where the checkpoint does not fit."""
    key = key_of(STEP, shard.name)
    if not saved.numel(key):  # written before the first step
        optimizer.state.pop(shard.tensor, None)
        return
    make: Any = type(optimizer)
    made = make([shard.tensor])
    made.init_state(made.param_groups[0], shard.tensor, 0, 0)
    state = made.state[shard.tensor]
    for kind in (*CODES, *SCALES):
        if kind in state:
            whole = Fragment(shard.name, 0, state[kind].numel(), 0)
            read_pieces(kind, state[kind], [whole], saved)
    state["step"] = int(saved.read(key, 0, 1))
    optimizer.state[shard.tensor] = state


def _own(shard: Shard, numel: int) -> Fragment:
    whole = Fragment(shard.name, 0, numel, 0)
    return own_part(whole, shard.ranks) if _is_replicated(shard) else whole


def _is_replicated(shard: Shard) -> bool:
    """ZeRO-0: every rank holds the same."""
    return [fragment.name for fragment in shard.fragments] == [shard.name]
