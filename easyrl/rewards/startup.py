"""Checks the rewards before a model loads: a typing error must not wait for the first response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards.user_function import check_signature
from easyrl.rewards.worker import load_reward
from easyrl.schema import Prompt


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Loads every reward function and checks that it takes its arguments.

    Raises ``ConfigError`` naming ``rewards[i].file``, ``.function`` or ``.kwargs``.
    """
    for index, reward in enumerate(rewards):
        problem = _problem(reward)
        if problem is not None:
            raise ConfigError(f"rewards[{index}].{problem}")


def _problem(reward: RewardConfig) -> str | None:
    try:
        function = load_reward(reward)
    except ImportError as error:
        return f"file: {error}"
    except ValueError as error:
        return f"function: {error}"
    try:
        check_signature(function, reward.kwargs)
    except TypeError as error:
        key = "kwargs" if reward.kwargs else "function"
        return f"{key}: {reward.label} {error}"
    if reward.name is None:
        return None
    try:
        # The built-in ones check their own kwargs; without responses they do nothing else.
        function(Prompt(0, np.zeros(1, np.int32), "", "0"), [], [], **reward.kwargs)
    except Exception as error:
        return f"kwargs: {reward.label} does not take {reward.kwargs}: {error}"
    return None
