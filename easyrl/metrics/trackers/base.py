"""What every tracker can do, and the package that one needs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Protocol


class Tracker(Protocol):
    """A metrics back end."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def note(self, name: str, text: str) -> None:
        """A text about the whole run; a later one of the same name replaces it."""

    def close(self) -> None: ...


class TrackerNotInstalled(ValueError):
    """The configuration names a tracker whose package is missing."""


def tracker_package(name: str, *, module: str | None = None) -> ModuleType:
    """The package of tracker ``name``, imported; ``module`` where that is called otherwise.

    Raises ``TrackerNotInstalled`` naming the extra that installs it.
    """
    try:
        return import_module(module or name)
    except ImportError as error:
        raise TrackerNotInstalled(not_installed(name)) from error


def not_installed(name: str) -> str:
    """The error of a missing package, with the remedy."""
    return f"run.trackers: {name} is not installed; pip install 'easyrl[{name}]'"
