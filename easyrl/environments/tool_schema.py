"""A typed Python function as a tool: its JSON schema, and its arguments checked."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import PydanticInvalidForJsonSchema

_ARGUMENT = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SECTION = re.compile(r"(Args|Arguments|Parameters):\s*$")
_NEXT_SECTION = re.compile(r"[A-Z]\w+:\s*$")


class BadArguments(ValueError):
    """What a model gave as arguments does not fit; the message is for the model."""


class FunctionSchema:
    """Name, description and parameters of a function, as a model is told of them.

    Parameters need annotations; what they mean is ``Annotated[..., Field(description=...)]``, or an
    ``Args:`` section of the docstring, ``name: meaning``. Raises ``ValueError`` for a function that
    cannot be one.
    """

    def __init__(self, function: Callable[..., Any], where: str = "") -> None:
        self.name = function.__name__
        where = where or self.name
        try:
            types = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ValueError(f"{where}: an annotation is not defined: {error}") from None
        summary, meanings = docstring_parts(inspect.getdoc(function) or "")
        if not summary:
            raise ValueError(
                f"{where}: tool {self.name} has no docstring, and a model knows a tool by it; "
                "write one"
            )
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(f"{where}: tool {self.name} takes *{name}; name its arguments")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ValueError(f"{where}: {name} of tool {self.name} cannot be given by name")
            if name not in types:
                raise ValueError(
                    f"{where}: {name} of tool {self.name} has no annotation; give it a type"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            # the name is the alias: a field called copy or json would hide a method of pydantic's
            meaning: dict[str, Any] = {"description": meanings[name]} if name in meanings else {}
            fields[f"argument_{name}"] = (types[name], Field(default, alias=name, **meaning))
        try:
            self._model = create_model(self.name, __base__=_Arguments, **fields)
            schema = self._model.model_json_schema(by_alias=True)
        except (
            PydanticSchemaGenerationError,
            PydanticInvalidForJsonSchema,
            PydanticUserError,
        ) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise ValueError(f"{where}: tool {self.name} has no JSON schema: {reason}") from None
        self.description = summary
        self.parameters = _without_titles(schema) | {"type": "object"}

    def arguments(self, written: str) -> dict[str, Any]:
        """What a model wrote, as keyword arguments of the right types. Raises ``BadArguments``."""
        try:
            checked = self._model.model_validate(parsed_arguments(written))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}"
                for each in error.errors(include_url=False, include_context=False)
            )
            raise BadArguments(f"invalid arguments: {problems}") from None
        return {
            name.removeprefix("argument_"): getattr(checked, name)
            for name in checked.model_fields_set
        }


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)


def parsed_arguments(written: str) -> Mapping[str, Any]:
    """The JSON object that a model wrote; nothing written is no arguments.

    Raises ``BadArguments``.
    """
    try:
        arguments = json.loads(written) if written.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"invalid arguments: they are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadArguments("invalid arguments: they have to be a JSON object")
    return arguments


def as_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as a chat request has it."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """What is above the section ``Args:``, and the meanings of the arguments in it."""
    above: list[str] = []
    meanings: dict[str, str] = {}
    name, is_inside, indent = "", False, 0
    for line in text.splitlines():
        if _SECTION.match(line):
            is_inside, name, indent = True, "", 0
        elif is_inside and _NEXT_SECTION.match(line):
            break
        elif not is_inside:
            above.append(line)
        elif line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            match = _ARGUMENT.match(line.strip())
            if match and depth <= indent:
                name = match[1].lstrip("*")
                meanings[name] = match[2]
            elif name:
                meanings[name] = f"{meanings[name]} {line.strip()}".strip()
    return "\n".join(above).strip(), meanings


def _without_titles(schema: Any, is_names: bool = False) -> Any:
    """pydantic's titles repeat the names; a model reads every token of them in every prompt."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value, key in ("properties", "$defs") and not is_names)
            for key, value in schema.items()
            if is_names or key != "title" or not isinstance(value, str)
        }
    if isinstance(schema, list):
        return [_without_titles(value) for value in schema]
    return schema
