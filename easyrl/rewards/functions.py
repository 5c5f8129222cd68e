"""Reward functions, built in or out of the user's own file: loaded, checked and called."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from easyrl.config import ConfigError, RewardConfig
from easyrl.config.secrets import redact
from easyrl.rewards.keywords import keyword_problem
from easyrl.runtime.user_code import FileRaises, NoPythonFile, run_file
from easyrl.schema import Prompt

RewardFunction = Callable[..., Any]  # (prompt, texts, token_ids, **kwargs) -> list[float], or async


class RewardFunctionError(Exception):
    """A reward function raised or returned nonsense; the message holds its traceback.

    ``what`` it did, on one line; ``where``: ``file:line`` if it raised in its own file.
    """

    def __init__(self, message: str, what: str = "failed", where: str | None = None) -> None:
        super().__init__(message, what, where)  # all, so that it survives pickling
        self.what, self.where = what, where

    def __str__(self) -> str:
        return str(self.args[0])


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Loads every reward function and checks that it takes its arguments, before a model loads.

    Raises ``ConfigError`` naming ``rewards[i].file``, ``.function`` or ``.kwargs``.
    """
    for index, reward in enumerate(rewards):
        if (problem := _problem(reward)) is not None:
            raise ConfigError(f"rewards[{index}].{problem}")


def _problem(reward: RewardConfig) -> str | None:
    try:
        function = load_reward(reward)
    except ImportError as error:
        return f"file: {error}"
    except ValueError as error:
        return f"function: {error}"
    signature = inspect.signature(function)
    try:
        signature.bind(None, [], [], **keywords(reward))
    except TypeError as error:
        given = "".join(f", {name}" for name in keywords(reward))
        called = f"is called with (prompt, texts, token_ids{given})"
        key, remedy = "kwargs", "give what it takes, and nothing else"
        if reward.name is None and not reward.kwargs:
            key, remedy = "function", "change its arguments"
        return f"{key}: {reward.label} takes {signature} but {called}: {error}; {remedy}"
    if reward.name is None:
        return None
    if (problem := keyword_problem(function, keywords(reward))) is not None:
        return f"kwargs: {reward.label} does not take them: {problem}"
    if reward.asks_endpoints:
        return None
    try:
        # What annotations cannot say, a built-in one checks itself; without responses it does
        # nothing else.
        function(Prompt(0, np.zeros(1, np.int32), "", "0"), [], [], **reward.kwargs)
    except Exception as error:
        return f"kwargs: {reward.label} does not take {redact(reward.kwargs)}: {error}"
    return None


def check_prompts(rewards: Sequence[RewardConfig], prompts: Iterable[Prompt]) -> None:
    """Checks that each prompt has what built-in rewards need of it, before a model loads.

    Raises ``ConfigError`` naming the reward, and file and line of the prompt.
    """
    checks = [
        (f"rewards[{index}]", reward, check)
        for index, reward in enumerate(rewards)
        if reward.name is not None
        and (check := vars(_module(reward.name)).get("check_prompt")) is not None
    ]
    for prompt in prompts if checks else ():
        for key, reward, check in checks:
            try:
                check(prompt, **reward.kwargs)
            except ValueError as error:
                raise ConfigError(
                    f"{key}: {reward.label} cannot score {prompt.location or prompt.index}: {error}"
                ) from error


def keywords(reward: RewardConfig) -> dict[str, Any]:
    """The keyword arguments that the function is called with.

    A reward that asks endpoints is told its time limit: it tries again until then.
    """
    own = {"timeout_s": reward.timeout_s} if reward.asks_endpoints else {}
    return {**reward.kwargs, **own}


def load_reward(reward: RewardConfig) -> RewardFunction:
    """The function that ``reward`` names. Raises ``ImportError`` or ``ValueError``."""
    if reward.file is not None:
        return _load_function(reward.file, reward.function)
    assert reward.name is not None
    function: RewardFunction = vars(_module(reward.name))[reward.name]
    return function


def _module(name: str) -> ModuleType:
    """The file of a built-in reward; only those of the run are imported."""
    return importlib.import_module(f"easyrl.rewards.{name}")


def _load_function(file: Path, name: str) -> RewardFunction:
    """Imports ``file``, its folder appended to ``sys.path``, and returns its function ``name``."""
    file = file.resolve()
    # two files of the same name must not share a module
    module_name = f"easyrl_reward_{hashlib.sha1(str(file).encode()).hexdigest()[:12]}"
    if module_name not in sys.modules:
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        try:
            run_file(file, module_name)
        except NoPythonFile:
            raise ImportError(f"{file} is not a Python file; name one that ends in .py") from None
        except FileRaises as error:
            said = f"{error.where}: {file} raises {error.what}; {error.remedy}"
            raise ImportError(said) from error.__cause__
    defined = vars(sys.modules[module_name])
    if name not in defined:
        functions = sorted(key for key, value in defined.items() if inspect.isfunction(value))
        raise ValueError(
            f"{file} defines no {name!r}; its functions: {', '.join(functions) or '-'}; name one "
            "of them, or define it"
        )
    function = defined[name]
    if not callable(function):
        raise ValueError(
            f"{name!r} in {file} is of type {type(function).__name__}, not a function; define it "
            f"as def {name}(prompt, texts, token_ids)"
        )
    return function


def call(function: RewardFunction, *args: Any) -> Any:
    """Calls a plain or an ``async`` function, in this process, to its end."""
    result = function(*args)
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result


def validated(result: Any, num_responses: int) -> list[float]:
    """``result`` as floats. Raises ``ValueError`` unless it is one finite number per response."""
    if not isinstance(result, Sequence | np.ndarray) or isinstance(result, str | bytes):
        raise ValueError(f"returned {result!r:.100}; expected a list of {num_responses} numbers")
    if len(result) != num_responses:
        raise ValueError(f"returned {len(result)} rewards for {num_responses} responses")
    for position, value in enumerate(result):
        if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
            raise ValueError(
                f"returned {value!r:.100} for response {position}; expected a finite number"
            )
    return [float(value) for value in result]
