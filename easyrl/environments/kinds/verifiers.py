"""An environment of the ``verifiers`` library, unmodified: module and arguments.

It is driven through ``verifiers.load_environment(module, **args)`` and ``run_rollout``; reward and
metrics are its rubric's, whose functions score one rollout each. Its own sampling arguments are not
sent: sampling is training's. A record with a field ``example_id`` is that row of the environment's
own data, a held-out one of what it has for evaluation; any other is given to it as it is. Imports
nothing of ours: it may run in a Python of its own.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

NEEDED = ("input", "client", "model", "sampling_args")  # parameters of run_rollout
OUT_OF_TURNS = "max_turns_exceeded"  # in the gateway's error where max_turns refuses a turn
VERSIONS = "install verifiers>=0.1.10,<0.4 there"


class GroupRewards(ValueError):
    """Reward functions of all rollouts of an example together: rollouts are scored one by one."""


class RolloutFailed(RuntimeError):
    """The library ended a rollout with an error."""


class Verifiers:
    """The loaded environment, and the client that all its rollouts share connections of."""

    max_rollouts: int | None = None  # open at a time; it does not say
    num_hung_threads = 0  # beside those of the event loop

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            import verifiers
        except ImportError as error:
            if error.name not in (None, "verifiers"):  # something that it needs
                raise
            raise ImportError(
                f"verifiers is not installed in {sys.executable}; {VERSIONS}, or name another "
                "interpreter by python"
            ) from None
        load_environment = getattr(verifiers, "load_environment", None)
        if load_environment is None:
            version = getattr(verifiers, "__version__", "of this version")
            raise ImportError(
                f"verifiers {version} in {sys.executable} has no load_environment(module, **args); "
                f"{VERSIONS}"
            )
        self._library = verifiers
        self._environment = load_environment(settings["verifiers"], **settings["args"])
        takes = inspect.signature(self._environment.run_rollout).parameters
        if missing := [name for name in NEEDED if name not in takes]:
            raise ImportError(
                f"run_rollout of verifiers in {sys.executable} takes no {missing[0]!r}; {VERSIONS}"
            )
        if names := _group_rewards(self._environment):
            raise GroupRewards(
                f"reward {', '.join(names)} of {settings['verifiers']} is given all rollouts of an "
                "example at once, and each is scored by itself here; make it a function of one "
                "(completion, answer, state, …), or take it out of the rubric: what compares the "
                "rollouts of a prompt is the recipe (recipe.name)"
            )
        self._client: Any = None
        self._rows: dict[bool, dict[int, dict[str, Any]]] = {}  # of held-out ones, and the others

    async def start(self) -> None:
        import openai

        self._client = openai.AsyncOpenAI(
            api_key="-", base_url="http://127.0.0.1", timeout=openai.Timeout(None, connect=30.0)
        )

    async def rollout(self, session: Any, prompt: Any) -> dict[str, Any]:
        client = self._client.with_options(base_url=session.base_url, api_key=session.api_key)
        wrapped = getattr(self._library, "OpenAIChatCompletionsClient", None)
        output = await self._environment.run_rollout(
            input=self._input(prompt),
            client=client if wrapped is None else wrapped(client),
            model=session.model,
            sampling_args={},
        )
        # behind its last turn the rubric has judged what there is
        if output.get("error") and OUT_OF_TURNS not in _told(output["error"]):
            raise RolloutFailed(_told(output["error"]))
        metrics = {
            name: float(value)
            for name, value in (output.get("metrics") or {}).items()
            if isinstance(value, (int, float))
        }
        return {"reward": output["reward"], "components": metrics}

    def _input(self, prompt: Any) -> dict[str, Any]:
        """A row as ``run_rollout`` takes it."""
        number = prompt.metadata.get("example_id")
        if number is not None:
            rows = self._rows_of(prompt.is_held_out)
            if number not in rows:
                of = "held-out data" if prompt.is_held_out else "data"
                raise ValueError(
                    f"record {prompt.index} has example_id {number!r}, and the environment's {of} "
                    f"has {len(rows)} rows without it; remove the field, or correct it"
                )
            return dict(rows[number])
        row = {
            "prompt": prompt.messages,
            "example_id": prompt.index,
            "info": prompt.metadata.get("info", prompt.metadata),
        }
        if prompt.answer is not None:
            row["answer"] = prompt.answer
        return row

    def _rows_of(self, is_held_out: bool) -> dict[int, dict[str, Any]]:
        """By ``example_id``; an environment without data for evaluation gives its other one."""
        if is_held_out not in self._rows:
            environment = self._environment
            rows = environment.get_eval_dataset() if is_held_out else environment.get_dataset()
            self._rows[is_held_out] = {
                row.get("example_id", n): dict(row) for n, row in enumerate(rows)
            }
        return self._rows[is_held_out]


def load(settings: dict[str, Any]) -> Verifiers:
    return Verifiers(settings)


def _group_rewards(environment: Any) -> list[str]:
    """Names of the functions that the library gives a group; of parts of an environment too."""
    waiting, names = [environment], list[str]()
    while waiting:
        each = waiting.pop()
        waiting += getattr(each, "envs", None) or []  # of an EnvGroup
        waiting += getattr(each, "rubrics", None) or []  # of a RubricGroup
        if (rubric := getattr(each, "rubric", None)) is not None:
            waiting.append(rubric)
        own = getattr(each, "_get_group_reward_func_names", None)
        found = own() if own is not None else []
        if not found and not hasattr(each, "rubrics") and getattr(each, "has_group_rewards", False):
            found = [type(each).__name__]  # it does not say which
        names += [str(name) for name in found if name not in names]
    return names


def _told(error: Any) -> str:
    """What the library says of an error, which is a mapping in newer versions."""
    if isinstance(error, dict):
        return str(error.get("error_chain_repr") or error.get("error") or error)
    return str(error)
