"""Keyword arguments out of a file, checked against the function that they are meant for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError, create_model

from easyrl.config.base import Section


def keyword_problem(function: Callable[..., Any], values: Mapping[str, Any]) -> str | None:
    """What is wrong with ``values`` as keyword-only arguments of ``function``; None if nothing is.

    Types and bounds are those of its annotations, and are strict: text is never read as a number.
    """
    try:
        _model(function).model_validate(dict(values))
    except ValidationError as error:
        return "; ".join(_describe(problem, function) for problem in error.errors())
    return None


@cache
def _model(function: Callable[..., Any]) -> type[BaseModel]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in _keywords(function).items()
    }
    return create_model(function.__name__, __base__=Section, **fields)


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _describe(problem: Any, function: Callable[..., Any]) -> str:
    path = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{path}: is required; add it"
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown; there are {', '.join(_keywords(function)) or 'none'}"
    if problem["type"] == "value_error":  # of a check of ours, which shows what may be shown
        return f"{path}: {problem['msg'].removeprefix('Value error, ')}"
    return f"{path}: {problem['msg']} (got {problem['input']!r:.100})"
