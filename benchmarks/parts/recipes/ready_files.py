"""The ready files of ``configs/recipes`` whose recipe learns from rewards or from a teacher."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.worktree import ROOT
from easyrl.config import Config
from easyrl.config.file import load_config
from easyrl.recipes.loading import load_recipe

FOLDER = ROOT / "configs" / "recipes"
CLIPPING_UPDATES = 4  # per batch, from which on a clip has to act
DISTANT_BOUNDS = {"cispo"}  # 5 as published: no ratio of the demo's gets there
# A response is not compared with its group's mean: rewards that are permuted inside a group tell
# of its prompt, and of how many right responses there were (easyrl/build/control.py).
NO_GROUP_BASELINE = {"ppo", "pf_ppo", "reinforce_pp"}


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
    def has_critic(self) -> bool:
        return load_recipe(self.config).needs.critic

    @property
    def has_teacher(self) -> bool:
        return load_recipe(self.config).needs.teacher is not None

    @property
    def clips(self) -> bool:
        """Whether a bound of the ratio has updates enough to act in."""
        is_bounded = bool(load_recipe(self.config).ratio_keys) and self.recipe not in DISTANT_BOUNDS
        return is_bounded and self.config.trainer.updates_per_batch >= CLIPPING_UPDATES

    @property
    def shuffle(self) -> str:
        """``scoring.shuffle_rewards`` of the control that must not learn."""
        return "across_prompts" if self.recipe in NO_GROUP_BASELINE else "true"

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
    """By the recipe's name, those that train on samples of endpoints, and not on records."""
    paths = sorted(folder.glob("*.yaml"))
    files = {path.stem: ReadyFile(path, load_config(path)) for path in paths}
    return {name: file for name, file in files.items() if file.config.source == "rollouts"}
