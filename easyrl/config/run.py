"""Sections ``run``, ``checkpoint``, ``journal`` and ``watchdog``: where a run writes, its seed and
mode, what of it is kept on disk, when it counts as standing still."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from easyrl.config.base import FilePath, Section


class RunConfig(Section):
    """Where the run writes, its seed, and its mode."""

    name: str = "easyrl"
    output_dir: FilePath = Path("runs/easyrl")
    seed: NonNegativeInt = 0
    mode: Literal["async", "sync"] = "async"
    determinism: Literal["none", "strict"] = "none"  # strict: the same bits in every weight and
    # metric, however groups arrive; needs endpoints whose responses do not depend on batching
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    wandb_project: str = "easyrl"
    console: bool = True
    event_log: bool = True

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        # part of run:attempt:v, and of the name of a folder that is removed at the end
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", value):
            raise ValueError("use letters, digits, '_', '-' and '.' only, as in my-run_2")
        return value


class CheckpointConfig(Section):
    """Checkpoints in ``<output_dir>/checkpoints``, the exported model in ``<output_dir>/model``."""

    every_steps: NonNegativeInt = 0  # 0: none but on SIGTERM and in an outage
    keep: PositiveInt = 2
    background: bool = True  # written while training goes on
    export_at_end: bool = True


class JournalConfig(Section):
    """Finished groups in ``<output_dir>/journal``, for resume in mid-batch, verify and replay."""

    fsync: Literal["group", "batch", "never"] = "batch"  # a killed process loses nothing with any;
    # what a machine that goes down may lose: nothing, groups of the open batch, more
    keep: Literal["resumable", "all"] = "resumable"  # resumable: back to the oldest checkpoint


class WatchdogConfig(Section):
    """Ends a run that makes no progress, with all stacks in the log."""

    window_s: NonNegativeFloat = 3600.0  # 0: no watchdog
    min_tokens_per_s: NonNegativeFloat = 0.0  # generated and trained tokens of this rank, mean over
    # the window; 0: a run with any progress at all goes on
