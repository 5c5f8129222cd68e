"""Sections ``checkpoint`` and ``journal``: what of a run is kept on disk."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from easyrl.config.base import Section


class CheckpointConfig(Section):
    """Checkpoints in ``<output_dir>/checkpoints``, the exported model in ``<output_dir>/model``."""

    every_steps: NonNegativeInt = 0  # 0: none but on SIGTERM and in an outage
    keep: PositiveInt = 2  # the last ones; those before them are removed
    background: bool = True  # written while training goes on
    export_at_end: bool = True  # the trained model as save_pretrained writes it


class JournalConfig(Section):
    """Finished groups in ``<output_dir>/journal``, for resume in mid-batch, verify and replay."""

    fsync: Literal["group", "batch", "never"] = "batch"  # a killed process loses nothing with any;
    # what a machine that goes down may lose: nothing, groups of the open batch, more
    keep: Literal["resumable", "all"] = "resumable"  # resumable: back to the oldest checkpoint
