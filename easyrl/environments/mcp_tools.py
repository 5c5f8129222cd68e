"""Tools of an MCP server, by the package ``mcp``, which is optional.

One connection serves all rollouts of a host: tools with a state of their own would mix theirs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from easyrl.config import ToolsConfig
from easyrl.environments.mcp_connection import McpConnection, McpPackage, either
from easyrl.environments.tool_schema import as_tool, parsed_arguments
from easyrl.environments.tools import Tool

RECONNECT_AFTER_S = 1.0  # for what ended a server to be over

log = logging.getLogger(__name__)


class McpToolFailed(RuntimeError):
    """The server says that a call failed."""


class McpServerLost(RuntimeError):
    """The server ended in a call, or could not be reached, and was not there once more either."""


class McpServer:
    """A server that a command starts, or one at a URL; connected to again where it was lost."""

    def __init__(self, config: ToolsConfig) -> None:
        """Raises ``ImportError`` without the package."""
        self._config, self._package = config, McpPackage()
        self._connection: McpConnection | None = None
        self._reconnecting = asyncio.Lock()

    async def tools(self) -> list[Tool]:
        """Starts or connects it, and asks what it has. Raises what the package raises."""
        self._connection = await McpConnection.open(self._config, self._package)
        listed = await self._connection.list_tools()
        return [McpTool(self, tool, self._config.timeout_s) for tool in listed]

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The package's result of a call; one that the server is lost in is made once more.

        Raises ``McpServerLost``, and what the package makes of a refusal.
        """
        used = self._connection
        assert used is not None
        try:
            return await used.session.call_tool(name, arguments)
        except Exception as error:
            if await used.lives():
                raise  # what the server says of this call
            log.warning("the MCP server was lost in a call of %s (%s)", name, _said(error))
        await asyncio.sleep(RECONNECT_AFTER_S)
        try:
            again = await self._reconnected(used)
        except Exception as error:
            raise McpServerLost(f"the MCP server cannot be reached ({_said(error)})") from error
        try:
            return await again.session.call_tool(name, arguments)
        except Exception as error:
            if await again.lives():
                raise
            raise McpServerLost("the MCP server ended in this call, and once more") from error

    async def _reconnected(self, lost: McpConnection) -> McpConnection:
        """The connection in place of ``lost``, the same one for all calls that it was lost in."""
        async with self._reconnecting:
            assert self._connection is not None
            if self._connection is lost:
                lost.close()
                self._connection = await McpConnection.open(self._config, self._package)
            return self._connection


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, server: McpServer, tool: Any, timeout_s: float) -> None:
        self._server = server
        self.name, self.timeout_s = tool.name, timeout_s
        parameters = either(tool, "input_schema", "inputSchema")
        self.schema = as_tool(tool.name, tool.description or "", parameters)

    async def call(self, arguments: str) -> str:
        result = await self._server.call(self.name, dict(parsed_arguments(arguments)))
        texts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
        if either(result, "is_error", "isError"):
            raise McpToolFailed("\n".join(texts))
        return "\n".join(texts)


def _said(error: Exception) -> str:
    leaf: BaseException = error
    while isinstance(leaf, BaseExceptionGroup):  # a group's first says more than the group
        leaf = leaf.exceptions[0]
    return f"{type(leaf).__name__}: {leaf}".removesuffix(": ")
