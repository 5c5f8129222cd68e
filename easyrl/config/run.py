"""Section ``run``: where a run writes, its seed and mode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, field_validator

from easyrl.config.base import FilePath, Section

MOST_CHARACTERS = 128  # of a name: names of files have 255, of which the run's own take some
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "prometheus"]


class RunConfig(Section):
    """Where the run writes, its seed, and its mode."""

    name: str = "easyrl"  # part of the weights' version that endpoints stamp, of names of files,
    # and of W&B's run
    output_dir: FilePath = Path("runs/easyrl")  # receives everything that the run writes
    seed: NonNegativeInt = 0  # of the order of prompts, of sampling, and of what a recipe or
    # template draws
    mode: Literal["async", "sync"] = "async"  # sync: training waits until all responses of a batch
    # are there, a control experiment: all other settings stay as they are, but that nothing is
    # computed ahead (trainer.look_ahead), and that max_inflight=auto finds what generates fastest
    determinism: Literal["none", "strict"] = "none"  # strict: the same bits in every weight and
    # metric, however groups arrive; needs endpoints whose responses do not depend on batching
    trackers: list[TrackerName] = ["tensorboard"]  # where metrics go beside
    # metrics.jsonl (docs/trackers.md): TensorBoard with any of them, nowhere with []
    project: str = "easyrl"  # what trackers file the run under (wandb, trackio, mlflow, swanlab)
    wandb_project: str | None = None  # for the tracker wandb; default: project
    console: bool = True  # a row per step
    event_log: bool = True  # events-rank*.jsonl: what happened when, for each rank

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        # part of run:attempt:v, and of the name of a folder that is removed at the end
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", value):
            raise ValueError("use letters, digits, '_', '-' and '.' only, as in my-run_2")
        if len(value) > MOST_CHARACTERS:
            raise ValueError(f"is part of names of files: use at most {MOST_CHARACTERS} characters")
        return value
