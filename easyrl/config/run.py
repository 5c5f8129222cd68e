"""Section ``run``: where a run writes, its seed and mode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, field_validator

from easyrl.config.base import FilePath, Section

MOST_CHARACTERS = 128  # of a name: names of files have 255, of which the run's own take some


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
        if len(value) > MOST_CHARACTERS:
            raise ValueError(f"is part of names of files: use at most {MOST_CHARACTERS} characters")
        return value
