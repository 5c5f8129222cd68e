"""Reads the configuration: YAML, dotted overrides, and errors that name key and remedy.

Every problem is listed as ``key.path: what is wrong; what would be right``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from easyrl.config import Config, ConfigError
from easyrl.config.base import Section
from easyrl.config.recipe import moved_keys


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads ``path`` (YAML), applies ``key.path=value`` overrides and validates the result.

    Relative paths are taken from the working directory. Raises ``ConfigError``.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        tree = OmegaConf.load(path)
        for override in overrides:
            _apply(tree, override)
        values = OmegaConf.to_container(tree, resolve=True)
    except InterpolationResolutionError as error:
        raise ConfigError(f"{path}: {error}\n(a literal ${{ is written \\${{)") from error
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return validate_config(values, source=str(path))


def _apply(tree: Any, override: str) -> None:
    """Sets one ``key.path=value`` in ``tree``; the value is read as YAML."""
    key, sep, value = override.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
        assert isinstance(parsed, dict)
        # Not a merge of trees: that cannot reach into a list, as in rewards[0].weight=2. A recipe's
        # keys are its own: recipe={name: ...} leaves no other's behind.
        OmegaConf.update(tree, key.strip(), parsed["value"], merge=key.strip() != "recipe")
    except (YAMLError, OmegaConfBaseException, TypeError) as error:
        # of an IPv6 address; YAML takes it for a list
        quoted = '; write it in quotes: ["http://[::1]:8000"]' if "://[" in value else ""
        raise ConfigError(f"override {override!r}: {error}{quoted}") from error


def validate_config(values: Any, source: str = "config") -> Config:
    """Validates a plain nested dict. Raises ``ConfigError``."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected a mapping of sections, got {type(values).__name__}")
    if moved := moved_keys(values):
        raise ConfigError("\n".join([f"{source}: keys that have another name now", *moved]))
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_describe(problem) for problem in error.errors()]
        raise ConfigError(f"{source}: {len(lines)} problem(s)\n" + "\n".join(lines)) from None


def dump_config(config: Config) -> str:
    """The resolved tree as YAML, readable by ``load_config``."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump(mode="json"))))


def _escape(value: Any) -> Any:
    """A tree whose strings OmegaConf reads back as they are, a literal ``${`` included."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def _describe(problem: Any) -> str:
    location, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown key"
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        message += f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
    elif problem["type"] == "missing":
        message = "is required"
    elif "input" in problem and not isinstance(problem["input"], dict | list | BaseModel):
        message += f" (got {problem['input']!r})"
    if not location:
        return "\n".join(f"  {line}" for line in message.splitlines())
    # A check of a whole section writes "key: what"; its key belongs to the path.
    own_key = re.match(r"(\w+): ", message)
    if problem["type"] == "value_error" and own_key:
        location, message = (*location, own_key[1]), message[own_key.end() :]
    # ("rewards", 0, "file") as rewards[0].file, the way overrides write it
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return f"  {''.join(parts).removeprefix('.')}: {message}"


def _known_keys(location: Sequence[Any]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return sorted(model.model_fields)
