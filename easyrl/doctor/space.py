"""Space on disk for what a run keeps, and in shared memory for the weights on their way."""

from __future__ import annotations

import shutil
from pathlib import Path

from easyrl.config import Config
from easyrl.doctor.finding import Finding, failed, ok
from easyrl.doctor.sizes import size
from easyrl.engines.deepspeed.memory import MASTER, MOMENTS, WEIGHT


def checkpoint_bytes(config: Config, num_parameters: int) -> float:
    """Of one checkpoint: fp32 masters and the optimizer's moments.

    Nothing with adapters, which alone are trained then: they are small beside the model.
    """
    if config.model.lora is not None:
        return 0.0
    return num_parameters * (MASTER + MOMENTS[config.trainer.optimizer])


def disk_finding(config: Config, num_parameters: int) -> Finding:
    """Of ``run.output_dir``: checkpoints that are kept, one more while it is written, the model."""
    kept, name = config.checkpoint, "disk space"
    num_kept = kept.keep + 1 if kept.every_steps else 1  # one, when the run is stopped
    needed = num_kept * checkpoint_bytes(config, num_parameters)
    if kept.export_at_end:
        needed += num_parameters * WEIGHT[config.model.dtype]
    free, folder = free_bytes(config.run.output_dir), config.run.output_dir
    what = f"{num_kept} checkpoint{'s' * (num_kept != 1)} and the model need {size(needed)}"
    said = f"{what}, {size(free)} are free in {folder}"
    if needed <= free:
        return ok(name, said)
    return failed(
        name, said, "free space, lower checkpoint.keep, or set run.output_dir to a larger disk"
    )


def weight_space_finding(config: Config, num_parameters: int) -> Finding:
    """Of ``weight_sync.directory``: the version that is served, the next one, and the probe's."""
    sync, name = config.weight_sync, "space for weight sync"
    copies = 2 + sync.probe
    needed = copies * num_parameters * WEIGHT[config.model.dtype]
    free = free_bytes(sync.directory)
    said = (
        f"{copies} versions of the weights need {size(needed)}, {size(free)} are free "
        f"in {sync.directory}"
    )
    if needed <= free:
        return ok(name, said)
    return failed(
        name,
        said,
        "free space there, set weight_sync.directory to a folder with more, or "
        "weight_sync.probe=false for one version less",
    )


def free_bytes(folder: Path) -> int:
    """Of the file system that ``folder`` is on, or will be on once it is made."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free
