"""A reward function out of the user's own file, and what is demanded of any reward function."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

RewardFunction = Callable[..., Any]  # (prompt, texts, token_ids, **kwargs) -> list[float], or async


class RewardFunctionError(Exception):
    """A reward function raised or returned nonsense; the message holds its traceback."""


def load_function(file: Path, name: str) -> RewardFunction:
    """Imports ``file`` and returns its function ``name``; its folder is appended to ``sys.path``.

    Raises ``ImportError`` with what the file raised, ``ValueError`` if the function is not there.
    """
    file = file.resolve()
    # Two files of the same name must not share a module; dataclasses and pickle want it registered.
    module_name = f"easyrl_reward_{hashlib.sha1(str(file).encode()).hexdigest()[:12]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise ImportError(f"{file} raises {type(error).__name__}: {error}") from error
    defined = vars(sys.modules[module_name])
    if name not in defined:
        functions = sorted(key for key, value in defined.items() if inspect.isfunction(value))
        raise ValueError(
            f"{file} defines no {name!r}; its functions: {', '.join(functions) or '-'}"
        )
    function = defined[name]
    if not callable(function):
        raise ValueError(f"{name!r} in {file} is of type {type(function).__name__}, not a function")
    return function


def check_signature(function: RewardFunction, kwargs: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` unless ``function`` takes ``(prompt, texts, token_ids, **kwargs)``."""
    signature = inspect.signature(function)
    try:
        signature.bind(None, [], [], **kwargs)
    except TypeError as error:
        keywords = "".join(f", {key}" for key in kwargs)
        raise TypeError(
            f"takes {signature} but is called with (prompt, texts, token_ids{keywords}): {error}"
        ) from None


def call(function: RewardFunction, *args: Any, **kwargs: Any) -> Any:
    """Calls a plain or an ``async`` function, in this process, to its end."""
    result = function(*args, **kwargs)
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result


def validated(result: Any, num_responses: int) -> list[float]:
    """``result`` as floats. Raises ``ValueError`` unless it is one finite number per response."""
    if not isinstance(result, Sequence | np.ndarray) or isinstance(result, str | bytes):
        raise ValueError(f"returned {result!r:.100}; expected a list of {num_responses} numbers")
    if len(result) != num_responses:
        raise ValueError(f"returned {len(result)} rewards for {num_responses} responses")
    return [_validated_number(value, position) for position, value in enumerate(result)]


def _validated_number(value: Any, position: int) -> float:
    if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
        raise ValueError(
            f"returned {value!r:.100} for response {position}; expected a finite number"
        )
    return float(value)
