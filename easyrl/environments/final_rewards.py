"""Rewards of an episode's last message: the run's reward functions, in the host process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from easyrl.config import RewardConfig
from easyrl.environments.call_threads import in_thread
from easyrl.rewards.functions import as_group_reward, check_rewards, load_reward, validated
from easyrl.schema import Prompt

NO_TOKENS = np.zeros(0, dtype=np.int32)  # of a message: rewards of token ids are refused


class RewardFailed(RuntimeError):
    """A reward took longer than its ``timeout_s``."""


class FinalRewards:
    """The weighted sum of ``rewards``. Raises ``ConfigError`` if one cannot be used."""

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        check_rewards(rewards)
        self._rewards = [(each, as_group_reward(each, load_reward(each))) for each in rewards]

    async def of(self, asked: Any, text: str) -> tuple[float, dict[str, float]]:
        """The sum and its parts for the last message ``text`` of ``asked`` (``host.Prompt``).

        Raises ``RewardFailed``, and what a reward raises.
        """
        prompt = Prompt(
            asked.index,
            NO_TOKENS,
            asked.text,
            asked.answer,
            epoch=asked.epoch,
            metadata=asked.metadata,
            messages=asked.messages,
        )
        total = 0.0
        components: dict[str, float] = {}
        for reward, function in self._rewards:

            def call(function: Any = function) -> Any:
                result = function(prompt, [text], [NO_TOKENS])
                return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

            try:
                result = await asyncio.wait_for(in_thread(call), reward.timeout_s)
            except TimeoutError:
                raise RewardFailed(
                    f"reward {reward.label} took longer than {reward.timeout_s:g} s"
                ) from None
            (value,) = validated(result, 1)
            if isinstance(value, dict):
                parts = {
                    f"{reward.label}/{name}": x for name, x in value.items() if name != "score"
                }
                components |= parts
                value = value["score"]
            if value is not None:  # else it has no opinion
                components[reward.label] = value
                total += reward.weight * value
        return total, components


async def _awaited(result: Any) -> Any:
    return await result
