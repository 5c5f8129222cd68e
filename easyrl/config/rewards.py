"""Sections ``rewards`` and ``scoring``: reward functions, and the processes that call them."""

from __future__ import annotations

import re
from typing import Any, Literal, Self, get_args

from pydantic import PositiveFloat, PositiveInt, model_validator

from easyrl.config.base import FilePath, Section

BuiltIn = Literal[
    "exact",
    "math",
    "format",
    "thinking_toggle",
    "length_target",
    "overlong",
    "repetition",
    "instructions",
    "reward_model",
    "remote",
]
OF_ENDPOINTS = ("reward_model", "remote")  # asked over HTTP, a request for a whole group


class RewardConfig(Section):
    """One reward: a built-in by ``name`` or a user's ``function`` in ``file``.

    A ``file`` that ends in .pkl is written by ``train_policy`` and holds one function.

    A call may run twice, and one result is dropped: short calls are sent to a worker several at a
    time, and those behind one that takes long are given to another worker as well.
    """

    name: BuiltIn | None = None  # a built-in one
    file: FilePath | None = None  # Python file of a function of one's own
    function: str = "reward_func"  # its name in the file
    weight: float = 1.0  # factor in the sum of all rewards
    scope: Literal["sample", "group"] | None = None  # which responses a call is given; default:
    # group for files, reward_model and remote
    timeout_s: PositiveFloat = 30.0  # of each call, from when a worker begins it
    kwargs: dict[str, Any] = {}  # passed to the function
    signature: Literal["auto", "easyrl", "trl", "verl"] = "auto"  # how a function of a file is
    # called: as ours, TRL's or verl's; auto: by its arguments' names
    log_as: str | None = None  # its name in metrics and records; default: name, or function

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.file is None):
            raise ValueError(f"give either name ({', '.join(get_args(BuiltIn))}) or file")
        if self.file is not None and not self.is_pickled and not self.file.is_file():
            raise ValueError(f"file: {self.file} does not exist; correct the path")
        if "timeout_s" in self.kwargs and self.asks_endpoints:
            raise ValueError("kwargs: timeout_s is a key of the reward itself; move it there")
        if self.name is not None and self.signature != "auto":
            raise ValueError("signature: is for a function of a file; remove it")
        if self.log_as is not None and not re.fullmatch(r"[\w.-]+", self.log_as):
            raise ValueError("log_as: only letters, digits, _, . and - can be in a metric's name")
        return self

    @property
    def label(self) -> str:
        """Its name in metrics and records."""
        return self.log_as or self.name or self.function

    @property
    def is_pickled(self) -> bool:
        """Whether its file is a pickled function, not Python; such a file may be written later."""
        return self.file is not None and self.file.suffix == ".pkl"

    @property
    def asks_endpoints(self) -> bool:
        return self.name in OF_ENDPOINTS

    @property
    def of_group(self) -> bool:
        """Whether a call is given all responses of a prompt, not one."""
        if self.scope is not None:
            return self.scope == "group"
        return self.file is not None or self.asks_endpoints


class ScoringConfig(Section):
    """How responses are scored, and the worker processes that decode and score them."""

    num_workers: PositiveInt = 2  # processes, of each rank
    on_reward_error: Literal["fail", "zero", "retry"] = "fail"  # retry: again, then fail
    max_reward_retries: PositiveInt = 2  # calls after the first, with on_reward_error: retry
    truncated_reward: float | None = None  # of a response cut off at max_tokens, or an
    # episode at max_turns; null: as scored
    shuffle_rewards: bool | Literal["across_prompts"] = False  # control experiment. true: rewards
    # are permuted inside each group; across_prompts: a group has those of another prompt's, for
    # recipes that do not compare responses within their group
