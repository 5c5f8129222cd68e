"""Reward functions, built in or out of the user's own file: loaded, checked and called."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from easyrl.config import ConfigError, RewardConfig
from easyrl.config.secrets import redact
from easyrl.rewards.keywords import keyword_problem
from easyrl.rewards.pickled import load_pickled
from easyrl.rewards.signatures import (
    CALLED,
    GroupReward,
    RewardFunction,
    adapted,
    form_of,
    require_columns,
    why_not,
)
from easyrl.runtime.user_code import FileRaises, NoPythonFile, definition, run_file
from easyrl.schema import Prompt

LARGEST = float(np.finfo(np.float32).max)  # rewards are trained in float32
# What a reward says of one response; None: no opinion; a mapping: its ``score``, and other parts
Value = float | None | dict[str, float]


class RewardFunctionError(Exception):
    """A reward function raised or returned nonsense; the message holds its traceback.

    ``what`` it did, on one line; ``where``: ``file:line`` if it raised in its own file; ``kind``:
    the name of the exception's type, if it raised one.
    """

    def __init__(
        self, message: str, what: str = "failed", where: str | None = None, kind: str = "its result"
    ) -> None:
        super().__init__(message, what, where, kind)  # all, so that it survives pickling
        self.what, self.where, self.kind = what, where, kind

    def __str__(self) -> str:
        return str(self.args[0])


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Loads every reward function and checks that it takes its arguments, before a model loads.

    A pickled one that is not there yet was checked by ``train_policy``, which writes it when the
    run's folder is its own. Raises ``ConfigError`` naming ``rewards[i].file``, ``.function``,
    ``.signature`` or ``.kwargs``.
    """
    for index, reward in enumerate(rewards):
        if reward.is_pickled and reward.file is not None and not reward.file.exists():
            continue
        if (problem := _problem(reward)) is not None:
            raise ConfigError(f"rewards[{index}].{problem}")


def check_function(reward: RewardConfig, function: RewardFunction) -> str | None:
    """Why ``function`` cannot be called as ``reward`` says, from the key on; None: it can."""
    try:
        form = form_of(function, reward.signature)
        problem = why_not(function, form, keywords(reward))
    except ValueError as error:
        return f"signature: {reward.label} {error}"
    if problem is None:
        return None
    given = "".join(f", {name}" for name in keywords(reward))
    called = f"is called with {CALLED[form].removesuffix(')')}{given})"
    key, remedy = "kwargs", "give what it takes, and nothing else"
    if reward.name is None and not reward.kwargs:
        key, remedy = "function", "change its arguments"
    takes = inspect.signature(function)
    return f"{key}: {reward.label} takes {takes} but {called}: {problem}; {remedy}"


def _problem(reward: RewardConfig) -> str | None:
    try:
        function = load_reward(reward)
    except ImportError as error:
        return f"file: {error}"
    except ValueError as error:
        return f"function: {error}"
    problem = check_function(reward, function)
    if reward.name is None or problem is not None:
        return problem
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
    """Checks that each prompt has what rewards need of it, before a model loads: what built-in ones
    check, and the arguments of a user's that are columns of the record.

    Raises ``ConfigError`` naming the reward, and file and line of the prompt.
    """
    checks = [
        (f"rewards[{index}]", reward, check)
        for index, reward in enumerate(rewards)
        if (check := _prompt_check(reward)) is not None
    ]
    for prompt in prompts if checks else ():
        for key, reward, check in checks:
            try:
                check(prompt)
            except ValueError as error:
                raise ConfigError(
                    f"{key}: {reward.label} cannot score {prompt.location or prompt.index}: {error}"
                ) from error


def _prompt_check(reward: RewardConfig) -> Callable[[Prompt], object] | None:
    """Raises ``ValueError`` for a prompt that the reward cannot score; None: it scores any."""
    if reward.name is not None:
        check = vars(_module(reward.name)).get("check_prompt")
        return None if check is None else partial(check, **reward.kwargs)
    function = load_reward(reward)
    form = form_of(function, reward.signature)
    if form == "easyrl":
        return None
    return partial(require_columns, function, form, keywords(reward))


def keywords(reward: RewardConfig) -> dict[str, Any]:
    """The keyword arguments that the function is called with.

    A reward that asks endpoints is told its time limit: it tries again until then.
    """
    own = {"timeout_s": reward.timeout_s} if reward.asks_endpoints else {}
    return {**reward.kwargs, **own}


def load_reward(reward: RewardConfig) -> RewardFunction:
    """The function that ``reward`` names. Raises ``ImportError`` or ``ValueError``."""
    if reward.file is not None:
        if reward.is_pickled:
            return load_pickled(reward.file)
        return _load_function(reward.file, reward.function)
    assert reward.name is not None
    function: RewardFunction = vars(_module(reward.name))[reward.name]
    return function


def as_group_reward(reward: RewardConfig, function: RewardFunction) -> GroupReward:
    """``function`` as one that is called with ``(prompt, texts, token_ids)``, whatever its form."""
    return adapted(function, form_of(function, reward.signature), keywords(reward))


def own_file(reward: RewardConfig, function: RewardFunction) -> Path | None:
    """The user's file that ``function`` is written in; None for a built-in one."""
    if reward.is_pickled and (place := definition(function)) is not None:
        file = Path(place.rpartition(":")[0])
        return file if file.is_file() else reward.file
    return reward.file


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


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a plain or an ``async`` function, in this process, to its end."""
    result = function(*args)
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result


def validated(result: Any, num_responses: int) -> list[Value]:
    """``result`` as what it says of each response; ``None`` alone is no opinion on any.

    Raises ``ValueError`` unless each is a finite number, ``None``, or a mapping with a ``score``.
    """
    if result is None:
        return [None] * num_responses
    if not isinstance(result, Sequence | np.ndarray) or isinstance(result, str | bytes):
        raise ValueError(f"returned {result!r:.100}; expected a list of {num_responses} numbers")
    if len(result) != num_responses:
        raise ValueError(f"returned {len(result)} rewards for {num_responses} responses")
    return [_value(value, f"for response {position}") for position, value in enumerate(result)]


def _value(value: Any, where: str) -> Value:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return _number(value, where)
    if value.get("score") is None:
        raise ValueError(
            f"returned {dict(value)!r:.100} {where}; expected a 'score' among its parts"
        )
    return {
        str(name): _number(part, f"as {name!r} {where}")
        for name, part in value.items()
        if name == "score" or isinstance(part, Real | np.bool_)  # texts are of no use in metrics
    }


def _number(value: Any, where: str) -> float:
    if not isinstance(value, Real | np.bool_) or not abs(float(value)) <= LARGEST:
        raise ValueError(f"returned {value!r:.100} {where}; expected a finite number (float32)")
    return float(value)
