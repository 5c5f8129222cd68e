"""The ready files of ``configs/recipes`` whose recipe learns from its reward."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.worktree import ROOT
from easyrl.config import Config
from easyrl.config.file import load_config
from easyrl.recipes.loading import load_recipe

FOLDER = ROOT / "configs" / "recipes"


@dataclass(frozen=True)
class ReadyFile:
    """A recipe on the demo's task, as its file has it."""

    path: Path
    config: Config

    @property
    def recipe(self) -> str:
        return self.path.stem

    @property
    def streams(self) -> bool:
        """Whether training begins with the first complete group."""
        return load_recipe(self.config).scope == "group"

    @property
    def num_batches(self) -> int:
        """Of a whole run. The file names its steps."""
        trainer = self.config.trainer
        assert trainer.max_steps is not None
        return trainer.max_steps // trainer.updates_per_batch

    @property
    def digest(self) -> str:
        """Of the file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]

    def num_steps(self, num_batches: int) -> int:
        """Optimizer steps of so many batches."""
        return num_batches * self.config.trainer.updates_per_batch


def ready_files(folder: Path = FOLDER) -> dict[str, ReadyFile]:
    """By the recipe's name, those whose runs are about rewards that endpoints' samples are given.

    Not those that train on records, nor those that learn from a teacher: shuffled rewards are no
    control of these.
    """
    paths = sorted(folder.glob("*.yaml"))
    files = {path.stem: ReadyFile(path, load_config(path)) for path in paths}
    return {name: file for name, file in files.items() if _learns_from_rewards(file.config)}


def _learns_from_rewards(config: Config) -> bool:
    if config.source != "rollouts" or not config.rewards:
        return False
    return "teacher" not in config.recipe.settings
