"""Reads the configuration: YAML, dotted overrides, and errors that name key and remedy.

Every problem is listed as ``key.path: what is wrong; what would be right``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from easyrl.config import Config, ConfigError
from easyrl.config.base import Section
from easyrl.config.environment import (
    escaped,
    expressions,
    with_variables_as_they_are,
    without_defaults,
)
from easyrl.config.file_errors import describe_interpolation, describe_yaml, why_not_there
from easyrl.config.presets import with_preset
from easyrl.config.recipe import MOVED, moved_keys
from easyrl.config.records import RecordsConfig
from easyrl.config.secrets import (
    REDACTED,
    KeyPath,
    dotted,
    is_secret_key,
    leaves,
    redact,
    redact_text,
    redacted_paths,
    secret_paths,
)

SHOWN = 5  # keys of a file that is something else


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    to_look_back: bool = False,
) -> Config:
    """Reads ``path`` (YAML), applies ``key.path=value`` overrides and validates the result.

    Relative paths are taken from the working directory. ``defaults``: a tree of keys for where the
    file has none. ``to_look_back``: at a run that is not to go on; secrets and environment
    variables may be missing. Raises ``ConfigError``.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} {why_not_there(path)}")
    try:
        tree: Any = OmegaConf.load(path)
        if defaults and OmegaConf.is_dict(tree):
            tree = OmegaConf.merge(defaults, tree)
        for override in overrides:
            _apply(tree, override)
        if to_look_back:
            tree = with_variables_as_they_are(tree)
    except YAMLError as error:
        raise ConfigError(describe_yaml(path, error)) from error
    except UnicodeDecodeError as error:
        reason = f"{error}; it is not UTF-8 text, convert the file (iconv does)"
        raise ConfigError(f"{path}: {reason}") from error
    except (OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"{path}: {error}; correct the file") from error
    return resolve_config(tree, str(path), to_look_back=to_look_back)


def resolve_config(tree: Any, source: str, *, to_look_back: bool = False) -> Config:
    """Validates an OmegaConf tree, whose environment variables are read now and kept by their
    names. Raises ``ConfigError``."""
    try:
        values = OmegaConf.to_container(tree, resolve=True)
        written = expressions(tree)
    except InterpolationResolutionError as error:
        raise ConfigError(f"{source}: {describe_interpolation(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {error}") from error
    if not to_look_back and (lost := redacted_paths(values)):
        lines = [
            f"  {dotted(path)}: was a secret in plain text, which is not kept; give it again as "
            "an override, best as ${oc.env:NAME} with the variable NAME exported"
            for path in lost
        ]
        raise ConfigError("\n".join([f"{source}: {len(lost)} problem(s)", *lines]))
    try:
        config = validate_config(values, source)
    except ConfigError as error:
        raise ConfigError(_without_secrets(str(error), values, written)) from None
    config._expressions.update(written)
    return config


def _apply(tree: Any, override: str) -> None:
    """Sets one ``key.path=value`` in ``tree``; the value is read as YAML."""
    key, sep, value = override.partition("=")
    if not sep or not key.strip():
        raise ConfigError(
            f"override {override!r} is not of the form key.path=value; write it without spaces"
        )
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
        assert isinstance(parsed, dict)
        # Not a merge of trees: that cannot reach into a list, as in rewards[0].weight=2. A recipe's
        # keys are its own: recipe={name: ...} leaves no other's behind.
        OmegaConf.update(tree, key.strip(), parsed["value"], merge=key.strip() != "recipe")
    except (YAMLError, OmegaConfBaseException, TypeError) as error:
        shown = f"{key}={REDACTED}" if is_secret_key(key) else redact_text(override)
        # of an IPv6 address; YAML takes it for a list
        quoted = '; write it in quotes: ["http://[::1]:8000"]' if "://[" in value else ""
        said = str(error).partition("\n    full_key")[0]
        hint = "; write the value as a configuration file has it"
        raise ConfigError(f"override {shown!r}: {said}{quoted or hint}") from error


def validate_config(values: Any, source: str = "config") -> Config:
    """Validates a plain nested dict, with the preset that it names. Raises ``ConfigError``."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected a mapping of sections, got {type(values).__name__}")
    if values and not set(values) & {*Config.model_fields, *MOVED}:
        raise ConfigError(
            f"{source}: has none of a configuration's sections ({', '.join(Config.model_fields)}), "
            f"but {', '.join(map(str, list(values)[:SHOWN]))}; name another file (configs/ has "
            "some)"
        )
    if moved := moved_keys(values):
        raise ConfigError("\n".join([f"{source}: keys that have another name now", *moved]))
    model: type[Config] = RecordsConfig if values.get("source") == "records" else Config
    preset = None
    if model is Config:
        values, preset = with_preset(values)
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        lines = [describe_problem(problem, model) for problem in error.errors()]
        if any(problem["type"] == "missing" for problem in error.errors()):
            lines.append("(add what is required; configs/ has files to start from)")
        raise ConfigError(
            f"{source}: {error.error_count()} problem(s)\n" + "\n".join(lines)
        ) from None
    config._preset = preset
    return config


def dump_config(config: Config) -> str:
    """The whole tree as YAML, readable by ``load_config``, without secrets.

    What comes from an environment variable is written as ``${oc.env:NAME}``; secrets in plain text
    (``plain_secrets``) are left out.
    """
    return OmegaConf.to_yaml(OmegaConf.create(public_tree(config)))


def public_tree(config: Config) -> dict[str, Any]:
    """What ``dump_config`` writes, as a tree, for trackers."""
    plain = config.model_dump(mode="json")
    written = config._expressions

    def public(value: Any, hidden: Any, path: KeyPath) -> Any:
        if path in written:
            return written[path] if hidden == value else without_defaults(written[path])
        if isinstance(value, dict):
            return {key: public(item, hidden[key], (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [public(item, hidden[i], (*path, i)) for i, item in enumerate(value)]
        return escaped(hidden) if isinstance(hidden, str) else hidden

    return public(plain, redact(plain), ())


def plain_secrets(config: Config) -> list[str]:
    """Keys whose values are secrets in plain text, by their names."""
    paths = secret_paths(config.model_dump(mode="json"))
    return [dotted(path) for path in paths if path not in config._expressions]


def _without_secrets(message: str, values: Any, written: Mapping[KeyPath, str]) -> str:
    """``message``, which may show some of ``values``, with stand-ins for what is secret."""
    stand_ins = dict.fromkeys(secret_paths(values), REDACTED) | dict(written)
    for path, value in leaves(values):
        if path in stand_ins:
            message = message.replace(f"(got {value!r})", f"(got {stand_ins[path]})")
            if isinstance(value, str) and len(value) >= 8:  # a short one may be in other words
                message = message.replace(value, stand_ins[path])
    return message


def describe_problem(problem: Any, config: type[Section]) -> str:
    """``key.path: what is wrong; what would be right`` of one of pydantic's errors."""
    location, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown key"
        known = _known_keys(config, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        message += f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
    elif problem["type"] == "missing":
        message = "is required"
    elif location[-1:] == ("api_key_env",):
        pass  # who writes the key itself there does not want to see it
    elif "input" in problem and not isinstance(problem["input"], dict | list | BaseModel):
        message += f" (got {problem['input']!r})"
    if not location:
        return "\n".join(f"  {line}" for line in message.splitlines())
    # A check of a whole section writes "key: what"; its key belongs to the path.
    own_key = re.match(r"(\w+): ", message)
    if problem["type"] == "value_error" and own_key:
        location, message = (*location, own_key[1]), message[own_key.end() :]
    return f"  {dotted(tuple(location))}: {message}"


def _known_keys(config: type[Section], location: Sequence[Any]) -> list[str]:
    model: Any = config
    for part in location:
        if isinstance(part, int):
            continue
        if part not in model.model_fields:
            model = model.named
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return sorted(model.model_fields)
