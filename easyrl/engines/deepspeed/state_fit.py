"""What a checkpoint says of itself, and whether an engine can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from easyrl.config import Config
from easyrl.engines.base import SavedState
from easyrl.engines.deepspeed.eight_bit import partitions_of
from easyrl.engines.deepspeed.pieces import MASTER, key_of

ENGINE, OPTIMIZER = "engine", "trainer.optimizer"
CRITIC = "number of the critic's parameters"
SCHEDULE = "schedule"  # steps taken; the rest of the schedule's state is the configuration
ENGINES = ("deepspeed", "megatron")  # that read each other's


def state_description(
    config: Config,
    *,
    engine: str,
    num_parameters: int,
    num_critic_parameters: int = 0,
    dp_size: int = 1,
) -> dict[str, Any]:
    """``num_parameters``: those of the whole model that are trained."""
    lora, trainer = config.model.lora, config.trainer
    description = {
        ENGINE: engine,
        "model.dtype": config.model.dtype,
        "model.lora": None if lora is None else lora.model_dump(),
        "trainer.old_policy": trainer.old_policy,
        OPTIMIZER: trainer.optimizer,
        "number of parameters": num_parameters,
        CRITIC: num_critic_parameters,
    }
    if trainer.optimizer == "adam8bit":
        description["blocks of 8-bit moments"] = partitions_of(trainer.zero_stage, dp_size)
    return description


def require_fit(mine: Mapping[str, Any], sizes: Mapping[str, int], saved: SavedState) -> None:
    """Raises ``ValueError`` with all that differs.

    ``mine``: ``state_description``, as it would be written now. ``sizes``: elements of each trained
    tensor of the whole model.
    """
    # checkpoints without the keys are AdamW's, and without a critic
    found = {OPTIMIZER: "adamw", CRITIC: 0} | dict(saved.description)
    if found.get(ENGINE) in ENGINES:
        found[ENGINE] = mine[ENGINE]
    theirs = {key: found.get(key) for key in mine}
    wrong = [f"{k} is {theirs[k]}, now {mine[k]}" for k in mine if theirs[k] != mine[k]]
    for name, size in sizes.items():
        numel = saved.numel(key_of(MASTER, name))
        if not wrong and numel != size:
            wrong.append(f"{name} has {numel} elements, now {size}")
    if wrong:
        raise ValueError(
            f"the checkpoint does not fit: {'; '.join(wrong)}; resume with the settings it was "
            "written with"
        )
