"""``easyrl recipes [NAME]``: the built-in recipes and presets, with their numbers' sources."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.table import Table

from easyrl.config import Config
from easyrl.config.presets import Preset, Published, preset_names, read_preset, written
from easyrl.runtime.terminal import print_plain

if TYPE_CHECKING:
    from easyrl.recipes import Recipe


def recipes_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="a recipe or preset, to see its keys")
    ] = None,
) -> None:
    """List recipes and presets; with NAME print all its keys with their sources, as YAML."""
    from easyrl.recipes.loading import BUILT_IN, no_such_recipe

    known = list(dict.fromkeys([*BUILT_IN, *preset_names()]))
    if name is None:
        table = Table("name", "kind", "trains", "what it is", "source")
        for each in known:
            entry = _entry(each)
            table.add_row(entry.name, entry.kind, entry.trains, entry.summary, entry.source)
        print_plain(table)
    elif name in known:
        print("\n".join(_yaml(_entry(name))))
    else:
        print(f"easyrl: {no_such_recipe(name)}", file=sys.stderr)
        raise typer.Exit(2)


@dataclass(frozen=True)
class _Entry:
    """What is shown of one name."""

    name: str
    recipe: type[Recipe]
    preset: Preset | None
    summary: str
    source: str

    @property
    def kind(self) -> str:
        if self.preset is None:
            return "recipe"
        of_its_own = self.preset.algorithm == self.name
        return "recipe, preset" if of_its_own else f"preset of {self.preset.algorithm}"

    @property
    def trains(self) -> str:
        """Whether training begins with the first complete group, if anything is sampled."""
        if self.recipe.source == "records":
            return "records"
        return "whole batch" if self.recipe().scope == "batch" else "streams"


def _entry(name: str) -> _Entry:
    from easyrl.recipes.loading import BUILT_IN

    preset = read_preset(name) if name in preset_names() else None
    recipe = BUILT_IN[name if preset is None else preset.algorithm]
    if preset is not None:
        return _Entry(name, recipe, preset, preset.summary, preset.source)
    # a recipe's file begins with what it is, and its paper in parentheses
    first = (inspect.getdoc(inspect.getmodule(recipe)) or "").partition("\n")[0]
    summary, _, source = first.removesuffix(").").rpartition(" (")
    return _Entry(name, recipe, None, summary, source)


def _yaml(entry: _Entry) -> Iterator[str]:
    """Lines of a configuration; what the name does not set is commented out."""
    yield f"# {entry.name} ({entry.kind}; {entry.trains}). {entry.source}"
    if entry.recipe.source == "records":
        yield "source: records"
    yield "recipe:"
    yield f"  name: {entry.name}"
    published = {} if entry.preset is None else entry.preset.settings
    for key, default in asdict(entry.recipe()).items():
        setting = published.get(f"recipe.{key}")
        line = f"{written(default)}  # default" if setting is None else _line(setting, default)
        yield f"  {key}: {line}"
    if entry.preset is not None:
        yield from _other_sections(entry.preset)
        yield from _remarks(entry.preset)


def _other_sections(preset: Preset) -> Iterator[str]:
    published = {**preset.settings, **preset.size_and_task}
    sections = dict.fromkeys(path.partition(".")[0] for path in published)
    for section in [section for section in sections if section != "recipe"]:
        own = {path: p for path, p in published.items() if path.partition(".")[0] == section}
        is_set = not own.keys().isdisjoint(preset.settings)
        if section not in own:
            yield f"{section}:" if is_set else f"# {section}:"
        for path, setting in own.items():
            indent = "" if path == section else "  "
            line = f"{path.rpartition('.')[2]}: {_line(setting, _default(path))}"
            if path in preset.settings:
                yield f"{indent}{line}"
            else:  # without the mark it fits below what stands above
                yield f"{indent}# {line}" if is_set else f"# {indent}{line}"


def _remarks(preset: Preset) -> Iterator[str]:
    if preset.size_and_task:
        yield "# Commented out: of the published run's size and task, not set by the name."
    if preset.not_stated:
        yield f"# Not stated in the publication: {', '.join(preset.not_stated)}."
    for difference in preset.differences:
        yield f"# Different there: {difference}."


def _line(setting: Published, default: Any) -> str:
    """The value, its source and, if that is another value, the default."""
    line = f"{written(setting.value)}  # {setting.source}"
    if default is PydanticUndefined or setting.value == default:
        return line
    return f"{line}; default {written(default)}"


def _default(path: str) -> Any:
    """Of a key of the configuration; undefined where the user has to give one."""
    section, _, key = path.partition(".")
    field = Config.model_fields[section]
    if not key:
        return field.default
    model = field.annotation
    assert isinstance(model, type) and issubclass(model, BaseModel)
    default = model.model_fields[key].get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default
