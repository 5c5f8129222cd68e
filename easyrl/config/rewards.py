"""Sections ``rewards`` and ``scoring``: reward functions, and the processes that call them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from easyrl.config.base import FilePath, Section


class RewardConfig(Section):
    """One reward: a built-in by ``name`` or a user's ``function`` in ``file``.

    A call may run twice, and one result is dropped: short calls are sent to a worker several at a
    time, and those behind one that takes long are given to another worker as well.
    """

    name: Literal["exact", "math", "format"] | None = None
    file: FilePath | None = None
    function: str = "reward_func"
    weight: float = 1.0
    scope: Literal["sample", "group"] | None = None  # built-ins: sample; files: group
    timeout_s: PositiveFloat = 30.0  # of each call, from when a worker begins it
    kwargs: dict[str, Any] = {}  # passed to the function

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.file is None):
            raise ValueError("give either name (exact, math, format) or file")
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"file: {self.file} does not exist; correct the path")
        return self

    @property
    def label(self) -> str:
        return self.name or self.function


class ScoringConfig(Section):
    """How responses are scored, and the worker processes that decode and score them."""

    num_workers: PositiveInt = 2
    on_reward_error: Literal["fail", "zero", "retry"] = "fail"  # retry: again, then fail
    max_reward_retries: PositiveInt = 2  # calls after the first, with on_reward_error: retry
    truncated_reward: float | None = None  # of a response cut off at max_tokens; null: as scored
    shuffle_rewards: bool = False  # control experiment: permute rewards inside each group
