"""What is wrong with a configuration file that cannot be read, as ``file:line: what; remedy``."""

from __future__ import annotations

import re
from pathlib import Path

from omegaconf.errors import InterpolationResolutionError
from yaml import MarkedYAMLError, YAMLError


def why_not_there(path: Path) -> str:
    if path.is_dir():
        return "is a directory; name the YAML file in it"
    if "=" in str(path):
        return "does not exist; give the configuration file first, then the overrides"
    return "does not exist; correct the path"


def describe_yaml(path: Path, error: YAMLError) -> str:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f"{path}: is not YAML ({error}); correct the file"
    mark, problem = error.problem_mark, error.problem or "is not YAML"
    remedy = "correct the line (a text with : # [ ] { } * ! in it belongs in quotes)"
    if "duplicate key" in problem:
        remedy = "remove one of the two"
    elif "cannot start any token" in problem:
        remedy = "indent with spaces, YAML takes no tabs"
    elif "constructor for the tag" in problem:
        remedy = "remove the tag, or put the text in quotes"
    elif "flow" in (error.context or "") and error.context_mark is not None:
        mark = error.context_mark  # where the bracket was opened
        remedy = "close this bracket, or put a text with such signs in quotes"
    elif "expected" in problem:  # found only behind what is wrong
        remedy = "correct the indentation of this line or of the one above"
    return f"{path}:{mark.line + 1}: {problem} (column {mark.column + 1}); {remedy}"


def describe_interpolation(error: InterpolationResolutionError) -> str:
    """``what at key; remedy`` of a ``${...}`` that leads nowhere."""
    said = str(error).partition("\n")[0]
    if variable := re.search("Environment variable '(.*)' not found", said):
        name = variable[1]
        said = (
            f"Environment variable '{name}' not found at {error.full_key}; export it, or give a "
            f"default as in ${{oc.env:{name},VALUE}}"
        )
    else:
        said += f" at {error.full_key}; name a key that is there"
    return f"{said}\n(a literal ${{ is written \\${{)"
