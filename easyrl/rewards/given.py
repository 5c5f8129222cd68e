"""Reward functions given as Python objects: their sections of the configuration, and their files.

A function at the top level of a file of its own is run from there. All others, those of the script
itself, lambdas, closures, bound methods, are pickled into the run's folder.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards.functions import check_function
from easyrl.rewards.pickled import pickle_reward


@dataclass(frozen=True)
class GivenRewards:
    """The rewards of a run that is started from Python."""

    sections: Sequence[Mapping[str, Any]]  # ``rewards`` of the configuration
    files: Mapping[Path, tuple[Callable[..., Any], bytes]]  # pickled functions, and their pickles

    @classmethod
    def of(cls, rewards: Any, folder: Path, rank: str) -> GivenRewards:
        """Of a list of functions and of built-in ones' names. Raises ``ConfigError``."""
        if not isinstance(rewards, Sequence):
            rewards = [rewards]  # whatever it is, it is named below
        if not rewards:
            raise ConfigError("reward: the list is empty; give a function or a built-in one's name")
        sections: list[dict[str, Any]] = []
        files: dict[Path, tuple[Callable[..., Any], bytes]] = {}
        for index, reward in enumerate(rewards):
            key = f"reward[{index}]" if len(rewards) > 1 else "reward"
            if isinstance(reward, str):
                sections.append({"name": reward})
                continue
            if not callable(reward):
                raise ConfigError(
                    f"{key}: {reward!r:.100} is neither a function nor the name of a built-in "
                    "reward; give one of these, or a list of them"
                )
            section: dict[str, Any] = {"function": _name(reward)}
            if (source := _file_of_its_own(reward)) is not None:
                section["file"] = str(source)
            else:
                file = folder / f"reward{index}-rank{rank}.pkl"
                try:
                    files[file] = (reward, pickle_reward(reward))
                except ValueError as error:
                    raise ConfigError(f"{key}: {_name(reward)} {error}") from error
                section["file"] = str(file)
            sections.append(section)
        _tell_apart(sections)
        return cls(sections, files)

    def check(self, rewards: Sequence[RewardConfig]) -> None:
        """Of the resolved configuration: whether the pickled ones are called as they can be.

        The others are checked when their files are run. Raises ``ConfigError``.
        """
        for index, reward in enumerate(rewards):
            given = None if reward.file is None else self.files.get(reward.file)
            if given is not None and (problem := check_function(reward, given[0])) is not None:
                raise ConfigError(f"rewards[{index}].{problem}")

    def write(self) -> None:
        """Writes the pickled ones; what is there already stays as it is."""
        for file, (_, content) in self.files.items():
            if not file.exists() or file.read_bytes() != content:
                file.write_bytes(content)


def _file_of_its_own(function: Any) -> Path | None:
    """The file that defines ``function`` at its top level, if that can be run by itself."""
    if not inspect.isfunction(function):
        return None
    module = sys.modules.get(function.__module__)
    if module is None or module.__name__ == "__main__" or module.__package__:
        return None  # a script's, or of a package, whose relative imports need its name
    file = inspect.getsourcefile(function)
    if vars(module).get(function.__name__) is not function:
        return None
    if file is None or Path(file) != Path(getattr(module, "__file__", None) or ""):
        return None
    return Path(file) if Path(file).is_file() else None


def _name(function: Any) -> str:
    """In metrics and messages."""
    function = getattr(function, "func", function)  # of a partial
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"[^\w.-]", "", name) or "reward"


def _tell_apart(sections: Sequence[dict[str, Any]]) -> None:
    """A name of its own in metrics for each, where several are called the same."""
    names = [section.get("name") or section["function"] for section in sections]
    for index, (section, name) in enumerate(zip(sections, names, strict=True)):
        if names.count(name) > 1:
            section["log_as"] = f"{name}_{index}"
