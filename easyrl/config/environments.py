"""Section ``environments``: what makes episodes of samples, and the processes that run it."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from easyrl.config.base import FilePath, Section
from easyrl.config.rewards import RewardConfig, ScoringConfig

EnvironmentKind = Literal["coroutine", "verifiers", "openenv", "tools"]
HistoryMode = Literal["keep", "as_template"]
OnFailure = Literal["mask", "zero", "fail"]
OF_TOKENS = ("overlong", "length_target", "repetition", "reward_model")  # rewards of token ids
VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~\w-]+", re.ASCII)  # RFC 9110, section 5.6.2
SOURCES = ("file", "verifiers", "openenv", "tools")


class ToolsConfig(Section):
    """Tools of one source: typed functions of a Python file, or an MCP server."""

    file: FilePath | None = None  # Python file of functions with annotations and docstrings
    functions: list[str] = []  # of the file, or tools of the server; empty: all that are public
    command: list[str] = []  # starts an MCP server that speaks over its standard input and output
    env: dict[str, str] = {}  # of the command: variables beside HOME, PATH and the like, which are
    # all that it gets of the trainer's; a secret as ${oc.env:NAME}
    url: str | None = None  # of an MCP server (streamable HTTP)
    headers: dict[str, str] = {}  # of each request to the url; a secret as ${oc.env:NAME}
    timeout_s: PositiveFloat = 30.0  # of each call; one that takes longer is an error to the model

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(map(bool, (self.file, self.command, self.url))) != 1:
            raise ValueError("give one of file, command and url")
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"file: {self.file} does not exist; correct the path")
        if self.env and not self.command:
            raise ValueError("env: is for command; remove it")
        if self.headers and self.url is None:
            raise ValueError("headers: are for url; remove them")
        if wrong := [name for name in self.env if not VARIABLE_NAME.fullmatch(name)]:
            raise ValueError(f"env: {wrong[0]!r} is no name of a variable; correct it")
        if wrong := [name for name in self.headers if not HEADER_NAME.fullmatch(name)]:
            raise ValueError(f"headers: {wrong[0]!r} is no name of a header; correct it")
        return self


class EnvironmentConfig(Section):
    """One environment: a coroutine of one's own, a verifiers or OpenEnv one, or tools."""

    name: str  # in metrics and records; a record whose field environment says it goes there
    file: FilePath | None = None  # Python file with a coroutine of one's own
    function: str = "rollout"  # its name: async def rollout(client, prompt)
    verifiers: str | None = None  # module of an environment of the verifiers library
    args: dict[str, Any] = {}  # passed to its load_environment
    python: FilePath | None = None  # interpreter of file or verifiers; default: the trainer's own
    openenv: str | None = None  # URL of an OpenEnv server
    action: str = "message"  # of openenv: field of the action that takes the model's text
    observation: str | None = None  # of openenv: field of an observation that the model is shown;
    # default: all of it, as JSON
    tools: list[ToolsConfig] = []  # a tool loop: the model calls them until it answers without
    rewards: list[RewardConfig] = []  # of tools: what the final message is worth
    weight: PositiveFloat = 1.0  # its share of the prompts, relative to the others'
    num_hosts: PositiveInt = 1  # processes, of each rank
    start_timeout_s: PositiveFloat = 600.0  # for a process to load it
    idle_timeout_s: PositiveFloat = 300.0  # a rollout without a request for so long has hung
    max_rollouts: PositiveInt | None = None  # open at a time, of all ranks; default: as many as an
    # OpenEnv server says that it serves, else twice what the endpoints may have in flight
    max_turns: PositiveInt = 16  # requests of a rollout; tools and openenv end behind the last, as
    # at the context's end, others are refused the next: 400, code max_turns_exceeded
    on_failure: OnFailure = "mask"  # a rollout that raises, hangs or dies: left out of its group
    # and not trained; trained with reward 0; or the run ends
    history: HistoryMode = "keep"  # where a template would render an earlier turn otherwise than it
    # was sampled, as one that strips reasoning does: keep its tokens, or let it, in a new branch

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError("name: only letters, digits, _, . and - can be in a metric's name")
        given = [source for source in SOURCES if getattr(self, source)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"give one of {', '.join(SOURCES)}; {found}")
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"file: {self.file} does not exist; correct the path")
        belongs = {
            "function": ("file",),
            "args": ("verifiers",),
            "python": ("file", "verifiers"),
            "action": ("openenv",),
            "observation": ("openenv",),
            "rewards": ("tools",),
        }
        for key, sources in belongs.items():
            is_given = getattr(self, key) != type(self).model_fields[key].default
            if is_given and given[0] not in sources:
                raise ValueError(f"{key}: is for {' and '.join(sources)}; remove it")
        if self.python is not None and not self.python.is_file():
            raise ValueError(f"python: {self.python} does not exist; correct the path")
        if self.tools and not self.rewards:
            raise ValueError("rewards: tools have none of their own; add one")
        for reward in self.rewards:
            if reward.name in OF_TOKENS:
                raise ValueError(
                    f"rewards: {reward.name} is a reward of token ids, and a tool loop has texts; "
                    "take another"
                )
            if reward.is_pickled:
                raise ValueError("rewards: a function of an environment has to be in a .py file")
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) != len(labels):
            raise ValueError(f"rewards: two are called the same ({labels}); set log_as of one")
        return self

    @property
    def kind(self) -> EnvironmentKind:
        if self.file is not None:
            return "coroutine"
        if self.verifiers is not None:
            return "verifiers"
        return "openenv" if self.openenv is not None else "tools"


def environment_contradictions(
    environments: list[EnvironmentConfig], rewards: list[RewardConfig], scoring: ScoringConfig
) -> list[str]:
    """What is wrong between them, and with the run's own ``rewards`` and ``scoring``."""
    problems = []
    names = [environment.name for environment in environments]
    if len(set(names)) != len(names):
        problems.append(f"environments: two are called the same ({names}); change the name of one")
    if environments and rewards:
        problems.append(
            "rewards: would not be asked, as an episode's reward is its environment's; remove "
            "them, or environments (tools have rewards of their own: environments[0].rewards)"
        )
    for key in ("on_reward_error", "max_reward_retries"):
        if environments and getattr(scoring, key) != ScoringConfig.model_fields[key].default:
            problems.append(
                f"scoring.{key}: has no effect beside environments, whose rewards come with their "
                "rollouts; remove it, and set on_failure of each environment "
                "(environments[0].on_failure)"
            )
    return problems
