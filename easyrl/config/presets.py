"""Presets: settings of published runs, each a YAML file with a source for every value.

A preset's name stands in ``recipe.name``, where its algorithm's would; its ``settings`` are
defaults below what the user sets, in any section. What belongs to the size and the task of the
published run (prompts, responses, updates, steps, tokens, rewards) is told and not set: a small run
could not use it, and a value that the user did not write should not make a configuration invalid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from omegaconf import OmegaConf
from pydantic import Field

from easyrl.config import Config
from easyrl.config.base import Section

FOLDER = Path(__file__).parents[1] / "recipes" / "presets"
Text = Annotated[str, Field(min_length=1)]


class Published(Section):
    """A value, and where the publication states it: section, equation or table."""

    value: Any
    source: Text


class Preset(Section):
    """A published run. Keys are dotted paths of the configuration, as ``trainer.learning_rate``."""

    algorithm: Text  # the built-in recipe that it is made of
    summary: Text
    paper: Text
    arxiv: Annotated[str, Field(pattern=r"^\d{4}\.\d{5}$")]
    settings: dict[str, Published]  # set where the user does not
    size_and_task: dict[str, Published]  # told, not set
    not_stated: list[str]  # keys that the publication leaves open
    differences: list[str]  # between the published run and one here

    @property
    def source(self) -> str:
        return f"{self.paper}, arXiv {self.arxiv}"


def preset_names() -> list[str]:
    """All presets, in alphabetical order."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


@cache
def read_preset(name: str) -> Preset:
    """The preset of that name. Raises ``OSError`` if there is none."""
    tree = OmegaConf.load(FOLDER / f"{name}.yaml")
    return Preset.model_validate(OmegaConf.to_container(tree))


def with_preset(values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A configuration as loaded, with the settings of the preset that it names, and the name.

    ``recipe.name`` becomes the preset's algorithm, so that a dump depends on no preset.
    """
    whole = dict(values)
    recipe = whole.get("recipe")
    if not isinstance(recipe, Mapping) or recipe.get("file") is not None:
        return whole, None
    name = recipe.get("name")
    if not isinstance(name, str) or name not in preset_names():
        return whole, None
    preset = read_preset(name)
    whole["recipe"] = {**recipe, "name": preset.algorithm}
    for path, published in preset.settings.items():
        section, key = path.split(".")
        given = whole.get(section, {})
        if isinstance(given, Mapping):  # anything else is refused later
            whole[section] = {key: published.value, **given}
    return whole, name


def preset_notices(config: Config) -> list[str]:
    """What a run says once of its preset: what the user has otherwise, and what it does not set."""
    name = config._preset
    if name is None:
        return []
    preset = read_preset(name)
    said = []
    if own := list(_differing(config, preset.settings)):
        said.append(
            f"recipe.name: the published {name} has {', '.join(own)}; the values set here count"
        )
    if left := list(_differing(config, preset.size_and_task)):
        said.append(
            f"recipe.name: the run that {name} is of ({preset.source}) had {', '.join(left)}; the "
            "name does not set these, as they belong to that run's size and task: `easyrl recipes "
            f"{name}` prints them all"
        )
    return said


def _differing(config: Config, published: Mapping[str, Published]) -> Iterator[str]:
    """``key=value (here value)`` for each that ``config`` has otherwise; of a tree the key."""
    tree = config.model_dump(mode="json")
    for path, setting in published.items():
        here = tree
        for key in path.split("."):
            here = here[key]
        if not _agrees(here, setting.value):
            is_tree = "{" in written(setting.value)
            yield path if is_tree else f"{path}={written(setting.value)} (here {written(here)})"


def _agrees(here: Any, value: Any) -> bool:
    """Whether ``here`` has all that ``value`` has; keys beside those are defaults."""
    if isinstance(value, dict):
        is_tree = isinstance(here, dict)
        return is_tree and all(k in here and _agrees(here[k], v) for k, v in value.items())
    if isinstance(value, list):
        same_length = isinstance(here, list) and len(here) == len(value)
        return same_length and all(_agrees(h, v) for h, v in zip(here, value, strict=True))
    return bool(here == value)


def written(value: Any) -> str:
    """``value`` in one line of YAML."""
    line = yaml.safe_dump(
        {"value": value}, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6
    )
    return line.removeprefix("{value: ").removesuffix("}\n")
