"""Files of the peers: JSON, YAML, Hydra's lists of overrides and commands, as a tree of values."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
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
            return _with_place(path, lambda: _nested(_overrides(text)))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: line {error.lineno} is no JSON ({error.msg}); write it with to_json_string()"
        ) from error
    except YAMLError as error:
        raise ConfigError(describe_yaml(path, error)) from error
    except (UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}; correct the file") from error
    if isinstance(tree, list) and all(isinstance(each, str) for each in tree):
        lines = "\n".join(map(shlex.quote, tree))
        return _with_place(path, lambda: _nested(_overrides(lines)))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: has no keys; name a file with a mapping, or with key=value")
    return _with_place(path, lambda: _nested(tree))


def _with_place(path: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


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
    """With references followed; one to what is in another file stays as it is written."""
    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException:
        return _followed(tree, OmegaConf.to_container(tree, resolve=False))


def _followed(tree: Any, raw: Any, before: str = "") -> Any:
    if isinstance(raw, dict):
        return {key: _followed(tree, raw[key], f"{before}{key}.") for key in raw}
    if not isinstance(raw, str) or "${" not in raw:
        return raw
    try:
        return OmegaConf.select(tree, before.removesuffix("."))
    except OmegaConfBaseException:
        return raw


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
    values: dict[str, Any] = {}
    variables: dict[str, str] = {}
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    try:
        words = shlex.split("\n".join(lines).replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(
            f"cannot be read as a shell does ({error}); close the quotation"
        ) from None
    for word in words:
        if found := _OVERRIDE.fullmatch(word):
            values[found[1]] = _value(found[1], Template(found[2]).safe_substitute(variables))
        elif found := _VARIABLE.fullmatch(word):
            variables[found[1]] = Template(found[2]).safe_substitute(variables)
    return values


def _value(key: str, text: str) -> Any:
    """``text`` as YAML has it."""
    if "$" in text:
        raise ConfigError(f"{key}: {text} is left to the shell; write the value itself")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (YAMLError, OmegaConfBaseException):
        raise ConfigError(f"{key}: {text!r} is no value as YAML has it; correct it") from None
    assert isinstance(parsed, dict)
    return parsed["value"]
