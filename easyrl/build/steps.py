"""How many optimizer steps a run takes, and how many prompts it draws."""

from __future__ import annotations

from pathlib import Path

from easyrl.config import Config
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.checkpoints.folder import CheckpointFolder, Damaged, read_manifest

DRAWS_PER_ACCEPTED = 10  # a recipe that rejects more than nine of ten groups is stuck


def num_epochs(config: Config) -> int | None:
    """Passes through the prompts; None: as many as ``max_steps`` needs."""
    return config.data.epochs if config.trainer.max_steps is None else None


def max_draws(config: Config) -> int:
    """Prompts that one batch may draw at most."""
    return config.trainer.max_draws_per_batch or DRAWS_PER_ACCEPTED * config.trainer.batch_size


def total_steps(
    config: Config, num_prompts: int, *, step: int = 0, position: int = 0, rejects: bool = False
) -> int | None:
    """``max_steps``, or the steps until the prompts of all epochs are trained.

    ``step`` steps have drawn the first ``position`` of them, of ``num_prompts`` in one epoch.
    Excluded prompts are not known beforehand, so that there may be fewer. None if the recipe
    ``rejects`` groups: nobody knows how many.
    """
    trainer = config.trainer
    if trainer.max_steps is not None:
        return trainer.max_steps
    if rejects:
        return None
    size = trainer.batch_size // trainer.updates_per_batch
    return step + -(-(num_prompts * config.data.epochs - position) // size)


def trained_before(checkpoints: Path, at_most: int | None = None) -> tuple[int, int]:
    """Steps and prompts of the checkpoint that a resumed run goes on from; zeros without one.

    ``at_most``: of that step or an earlier one.

    For the schedule, which is made before the checkpoint can be loaded and looked at closely.
    """
    folder = CheckpointFolder(checkpoints)
    for step in reversed(folder.steps()):
        if at_most is not None and step > at_most:
            continue
        try:
            progress = read_manifest(folder.path(step))["state"]["progress"]
        except Damaged:  # told when it is loaded
            continue
        return int(progress["step"]), int(progress["position"])
    return 0, 0


def has_more_batches(config: Config, order: PromptOrder, *, step: int, position: int) -> bool:
    """Whether a run that has taken ``step`` steps and drawn ``position`` prompts goes on."""
    trainer = config.trainer
    has_steps = trainer.max_steps is None or step + trainer.updates_per_batch <= trainer.max_steps
    return has_steps and order.num_left(position) != 0
