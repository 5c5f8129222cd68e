"""A coroutine of the user's, ``async def rollout(client, prompt)``, in a file.

``client`` is an ``openai.AsyncOpenAI``, or, where the first parameter is annotated as
``easyrl.environments.client.Client``, that one, which also takes token ids. Imports nothing of
ours at the top: the file may belong to another Python.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OWN_CLIENT = "easyrl.environments.client"


class Coroutine:
    """The user's function, and the client that all its rollouts share connections of."""

    max_rollouts: int | None = None  # open at a time; it does not say
    num_hung_threads = 0  # beside those of the event loop

    def __init__(self, settings: dict[str, Any]) -> None:
        self._function = _function(Path(settings["file"]).resolve(), settings["function"])
        self._takes_own = _takes_own_client(self._function)
        self._client: Any = None

    async def start(self) -> None:
        if self._takes_own:
            from easyrl.environments.client import Connections

            self._client = Connections()
            return
        try:
            import openai
        except ImportError:
            raise ImportError(
                f"openai is not installed in {sys.executable}: pip install openai there, or "
                f"annotate the function's first parameter as {OWN_CLIENT}.Client"
            ) from None
        # one for all rollouts: each of its own would load certificates; what a model needs for an
        # answer is bounded by the run, not by a time limit here
        self._client = openai.AsyncOpenAI(
            api_key="-", base_url="http://127.0.0.1", timeout=openai.Timeout(None, connect=30.0)
        )

    async def rollout(self, session: Any, prompt: Any) -> Any:
        if self._takes_own:
            client = self._client.client(session.base_url, session.api_key, session.model)
        else:
            client = self._client.with_options(base_url=session.base_url, api_key=session.api_key)
        return await self._function(client, prompt)


def load(settings: dict[str, Any]) -> Coroutine:
    return Coroutine(settings)


def _function(file: Path, name: str) -> Callable[..., Any]:
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location("easyrl_environment", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["easyrl_environment"] = module
    spec.loader.exec_module(module)
    function: Any = vars(module).get(name)
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    ):
        found = "nothing" if function is None else "something else"
        raise ValueError(
            f"{file} has {found} called {name!r}; define it as async def {name}(client, prompt)"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{name} in {file} takes {inspect.signature(function)} but is called with (client, "
            f"prompt): {error}"
        ) from None
    return function


def _takes_own_client(function: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        names = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            annotation = eval(annotation, names)
        except Exception:  # imported for type checkers alone
            return False
    return getattr(annotation, "__module__", None) == OWN_CLIENT
