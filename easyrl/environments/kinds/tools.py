"""A tool loop: the model calls tools until it answers without, and its last message is scored."""

from __future__ import annotations

from typing import Any

from easyrl.config import EnvironmentConfig
from easyrl.environments.call_threads import num_hung
from easyrl.environments.client import Connections
from easyrl.environments.final_rewards import FinalRewards
from easyrl.environments.tool_sources import tools_of
from easyrl.environments.tools import Tools, tool_episode


class ToolLoop:
    """The tools of all sources, and the rewards of the last message."""

    max_rollouts: int | None = None  # open at a time; it does not say

    @property
    def num_hung_threads(self) -> int:
        """Of calls of tools and rewards that did not end in their time."""
        return num_hung()

    def __init__(self, settings: dict[str, Any]) -> None:
        config = EnvironmentConfig.model_validate(settings)
        self._config, self._connections = config, Connections()
        self._rewards = FinalRewards(config.rewards)
        self._sources = [tools_of(source) for source in config.tools]
        self._tools = Tools([])

    async def start(self) -> None:
        self._tools = Tools([tool for source in self._sources for tool in await source.open()])

    async def rollout(self, session: Any, prompt: Any) -> dict[str, Any]:
        client = self._connections.client(session.base_url, session.api_key, session.model)
        ended = await tool_episode(
            client,
            prompt.messages,
            self._tools,
            max_turns=self._config.max_turns,
            on_call=session.add_tool_call,
        )
        reward, components = await self._rewards.of(prompt, ended.text)
        return {"reward": reward, "components": components | ended.components}


def load(settings: dict[str, Any]) -> ToolLoop:
    return ToolLoop(settings)
