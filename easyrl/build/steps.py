"""How many optimizer steps a run takes."""

from __future__ import annotations

from pathlib import Path

from easyrl.config import TrainerConfig
from easyrl.ledger.checkpoints.folder import CheckpointFolder
from easyrl.ledger.checkpoints.manifest import Damaged, read_manifest


def total_steps(
    config: TrainerConfig, num_prompts: int, *, step: int = 0, position: int = 0
) -> int:
    """Steps until ``num_prompts`` prompts of all epochs are trained, or ``max_steps``.

    ``step`` steps have trained the first ``position`` of them. A short last batch may have fewer
    updates than the others.
    """
    whole, rest = divmod(num_prompts - position, config.batch_size)
    size = -(-rest // config.updates_per_batch) or 1
    steps = step + whole * config.updates_per_batch + -(-rest // size)
    return min(steps, config.max_steps or steps)


def trained_before(checkpoints: Path) -> tuple[int, int]:
    """Steps and prompts of the checkpoint that a resumed run goes on from; zeros without one.

    For the schedule, which is made before the checkpoint can be loaded and looked at closely.
    """
    folder = CheckpointFolder(checkpoints)
    for step in reversed(folder.steps()):
        try:
            progress = read_manifest(folder.path(step))["state"]["progress"]
        except Damaged:  # told when it is loaded
            continue
        return int(progress["step"]), int(progress["cursor"]["position"])
    return 0, 0
