"""Every key of the configuration: its type, default and meaning, and who reads it.

``python -m easyrl.config.reference > docs/configuration.md``. Meanings are the comments beside the
keys in this package; who reads a key is where the other rooms name it.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from easyrl.config import Config
from easyrl.config.base import Section

ROOMS = ("easyrl", "dataloaders", "inference_client", "kernels")
MOST_READERS = 3
ATTRIBUTE = re.compile(r"(\w+)?\.(?=(\w+))")  # also of what is no word: ``f(x).name``
NAMES = {str: "text", int: "integer", float: "number", bool: "true, false", Path: "path"}
HEAD = """# Configuration

Every key of the YAML file, made from the sources by `python -m easyrl.config.reference`.
`KEY[]` is an entry of a list. A recipe's own keys are in [recipes](recipes.md), and
`easyrl train CONFIG --print-config` shows those of a run; runs on records have the keys of
[supervised](supervised.md). Values are taken as they are written, no type is guessed; an unknown
key is an error that names the nearest.
"""


@dataclass(frozen=True)
class Key:
    """A key of the configuration."""

    path: str  # dotted
    type: str
    default: str
    meaning: str
    readers: Sequence[str]  # files


def keys(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """Those of a section, and of the sections in it, in the order of the sources."""
    meanings = _meanings(section)
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        below = _section_in(field.annotation)
        is_list = get_origin(field.annotation) is list
        if below is None or is_list or not field.is_required() and field.get_default() is None:
            default = "required" if field.is_required() else _default(field)
            meaning = meanings.get(name, "")
            if below is not None and not meaning:
                meaning = (below.__doc__ or "").strip().partition("\n")[0]
            yield Key(path, _type(field), default, meaning, _readers(path))
        if below is not None:
            yield from keys(below, f"{path}{'[]' * is_list}.")
    if section.named is not None:
        meaning = (section.named.__doc__ or "").strip().partition("\n")[0]
        others = ", ".join(f"`{name}`" for name in section.named.model_fields)
        meaning = f"{meaning} Any name: letters, digits, _ and -. Has {others}"
        yield Key(f"{prefix}<name>", "section", "", meaning, [])


def markdown() -> str:
    """``docs/configuration.md``."""
    lines, section = [HEAD], None
    for key in keys():
        if (own := re.split(r"[.\[]", key.path)[0]) != section:
            section = own
            lines += [f"\n## {own}\n", "| key | type | default | meaning | read by |"]
            lines.append("|---|---|---|---|---|")
        readers = ", ".join(f"`{reader}`" for reader in key.readers)
        cells = (f"`{key.path}`", key.type, key.default, key.meaning, readers)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds: itself, an optional one, or entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for part in get_args(annotation):
        if (found := _section_in(part)) is not None:
            return found
    return None


def _type(field: FieldInfo) -> str:
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(
            f"`{part}`".lower() if part in (True, False) else f"`{part}`" for part in parts
        )
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _describe(part) for part in parts)
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _describe(annotation.__origin__, annotation.__metadata__)
    if origin is list:
        return f"list of {_describe(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(_describe(part) for part in parts)}]"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    name = NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))
    return name + _bounds(constraints)


def _bounds(constraints: Sequence[Any]) -> str:
    said = ""
    for each in _flat(constraints):
        for kind, sign in (
            (annotated_types.Gt, ">"),
            (annotated_types.Ge, "≥"),
            (annotated_types.Lt, "<"),
            (annotated_types.Le, "≤"),
        ):
            if isinstance(each, kind):
                said += f" {sign} {getattr(each, kind.__name__.lower())}"
    return said


def _flat(constraints: Sequence[Any]) -> Iterator[Any]:
    for each in constraints:
        yield from _flat(each.metadata) if isinstance(each, FieldInfo) else (each,)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool) or value is None:
        return {True: "`true`", False: "`false`", None: ""}[value]
    if isinstance(value, Path | str):
        return f"`{value}`" if str(value) else "empty"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _meanings(section: type[Section]) -> dict[str, str]:
    """By key: the comments beside it, below it, or else above it."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, Section) and owner is not Section:
            found |= _comments(owner)
    return found


@cache
def _comments(owner: type[Section]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(owner))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    comments = {
        token.start[0]: (token.string.lstrip("# "), token.line.strip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    fields = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    found = {}
    for node in fields:
        assert isinstance(node.target, ast.Name) and node.end_lineno is not None
        lines = [comments[n][0] for n in range(node.lineno, node.end_lineno + 1) if n in comments]
        if lines:
            line = node.end_lineno + 1
            while line in comments and comments[line][1]:
                lines.append(comments[line][0])
                line += 1
        else:
            line = node.lineno - 1
            while line in comments and comments[line][1]:
                lines.insert(0, comments[line][0])
                line -= 1
            if line in comments:  # they go on with what is said beside the key before
                lines = []
        if lines:
            found[node.target.id] = " ".join(lines)
    return found


def _readers(path: str) -> list[str]:
    """Files that name the key behind its section."""
    *_, section, name = [None, *re.sub(r"\[\]", "", path).split(".")]
    return _named_in().get((section, name), [])[:MOST_READERS]


@cache
def _named_in() -> dict[tuple[str | None, str], list[str]]:
    """By word and the attribute behind it, the files that name both; with None for any word."""
    found: defaultdict[tuple[str | None, str], list[str]] = defaultdict(list)
    for file, text in _sources().items():
        pairs = {(match[1], match[2]) for match in ATTRIBUTE.finditer(text)}
        for pair in pairs | {(None, name) for _, name in pairs}:
            found[pair].append(file)
    return found


@cache
def _sources() -> dict[str, str]:
    """Texts of all files but those that name keys and read none, by path."""
    root = Path(__file__).parents[2]
    files = [file for room in ROOMS for file in sorted((root / room).rglob("*.py"))]
    own = {root / "easyrl" / "config", root / "easyrl" / "convert"}
    return {str(f.relative_to(root)): f.read_text() for f in files if own.isdisjoint(f.parents)}


if __name__ == "__main__":
    print(markdown(), end="")
