"""Files of the peers: JSON, YAML, Hydra's lists of overrides and commands, as a tree of values."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from easyrl.config import ConfigError
from easyrl.config.file_errors import describe_yaml, why_not_there

_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w]*(?:\.[\w]+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"(?:export )?([A-Za-z_]\w*)=(.*)", re.DOTALL)


def read_tree(path: Path) -> dict[str, Any]:
    """A tree of the file's values. Raises ``ConfigError``."""
    if not path.is_file():
        raise ConfigError(f"{path} {why_not_there(path)}")
    try:
        text = path.read_text()
        if path.suffix == ".json":
            tree = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            tree = _resolved(OmegaConf.load(path))
        else:
            return _nested(_overrides(text))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: line {error.lineno} is no JSON ({error.msg}); write it with to_json_string()"
        ) from error
    except YAMLError as error:
        raise ConfigError(describe_yaml(path, error)) from error
    except (UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}; correct the file") from error
    if isinstance(tree, list) and all(isinstance(each, str) for each in tree):
        return _nested(_overrides("\n".join(map(shlex.quote, tree))))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: has no keys; name a file with a mapping, or with key=value")
    return _nested(tree)


def flat(tree: Mapping[str, Any], known: Iterable[str], before: str = "") -> dict[str, Any]:
    """Values by dotted key; what lies below a key in ``known`` is one value."""
    known = set(known)
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{before}{name}"
        if isinstance(value, dict) and key not in known:
            found |= flat(value, known, f"{key}.")
        elif name != "_target_" and value != "???":  # a class of Hydra's; a value that is missing
            found[key] = value
    return found


def _resolved(tree: Any) -> Any:
    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException:  # of a part of a file, whose other parts are elsewhere
        return _without_references(OmegaConf.to_container(tree, resolve=False))


def _without_references(tree: Any) -> Any:
    if isinstance(tree, dict):
        kept = {key: _without_references(value) for key, value in tree.items()}
        return {k: v for k, v in kept.items() if not (isinstance(v, str) and "${" in v)}
    return tree


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as trees."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = str(key).split(".")
        below = tree
        for section in sections:
            below = below.setdefault(section, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{key}: {section} has a value already; remove one of the two")
        value = _nested(value) if isinstance(value, dict) else value
        if isinstance(value, dict) and isinstance(below.get(last), dict):
            value = {**below[last], **value}
        below[last] = value
    return tree


def _overrides(text: str) -> dict[str, Any]:
    """``key.path=value`` of a command or script, with the script's own plain variables."""
    values, variables = {}, {}
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for word in shlex.split("\n".join(lines).replace("\\\n", " "), comments=True):
        if found := _OVERRIDE.fullmatch(word):
            said = Template(found[2]).safe_substitute(variables)
            if "$" in said:
                raise ConfigError(
                    f"{found[1]}: {said} is left to the shell; write the value itself"
                )
            values[found[1]] = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={said}"]))["v"]  # type: ignore[index, call-overload]
        elif found := _VARIABLE.fullmatch(word):
            variables[found[1]] = Template(found[2]).safe_substitute(variables)
    return values
