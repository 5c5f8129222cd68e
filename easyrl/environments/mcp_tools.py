"""Tools of an MCP server, by the package ``mcp``, which is optional.

One connection serves all rollouts of a host: tools with a state of their own would mix theirs.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any

from easyrl.environments.tool_schema import as_tool, parsed_arguments
from easyrl.environments.tools import Tool


class McpToolFailed(RuntimeError):
    """The server says that a call failed."""


class McpServer:
    """A server that ``command`` starts, or one at ``url``; opened once and kept for good."""

    def __init__(self, command: list[str], url: str | None, timeout_s: float) -> None:
        try:
            self._mcp = import_module("mcp")
        except ImportError:
            raise ImportError(
                f"tools of an MCP server need the package mcp in {sys.executable}: pip install mcp"
            ) from None
        self._command, self._url, self._timeout_s = command, url, timeout_s
        self._opened: asyncio.Future[Any] | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def tools(self) -> list[Tool]:
        """Starts or connects it, and asks what it has. Raises what the package raises."""
        loop = asyncio.get_running_loop()
        self._opened = loop.create_future()
        self._keeping = loop.create_task(self._keep(self._opened))
        session = await self._opened
        listed, cursor = [], None
        while True:
            page = await session.list_tools(**({} if cursor is None else {"cursor": cursor}))
            listed += page.tools
            cursor = _either(page, "next_cursor", "nextCursor")
            if not cursor:
                break
        return [McpTool(session, tool, self._timeout_s) for tool in listed]

    async def _keep(self, opened: asyncio.Future[Any]) -> None:
        """In a task of its own: what the package opens has to be closed by the same task."""
        try:
            async with self._transport() as (read, write, *_):
                async with self._mcp.ClientSession(read, write) as session:
                    await session.initialize()
                    opened.set_result(session)
                    await asyncio.Event().wait()  # for as long as the process lives
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)

    def _transport(self) -> Any:
        if self._command:
            stdio = import_module("mcp.client.stdio")
            program, *arguments = self._command
            parameters = self._mcp.StdioServerParameters(command=program, args=arguments)
            return stdio.stdio_client(parameters)
        http = import_module("mcp.client.streamable_http")
        # its name differs between the package's versions
        known = ("streamable_http_client", "streamablehttp_client")
        connect = next(vars(http)[name] for name in known if name in vars(http))
        return connect(self._url)


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, session: Any, tool: Any, timeout_s: float) -> None:
        self._session = session
        self.name, self.timeout_s = tool.name, timeout_s
        parameters = _either(tool, "input_schema", "inputSchema")
        self.schema = as_tool(tool.name, tool.description or "", parameters)

    async def call(self, arguments: str) -> str:
        result = await self._session.call_tool(self.name, dict(parsed_arguments(arguments)))
        texts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
        if _either(result, "is_error", "isError"):
            raise McpToolFailed("\n".join(texts))
        return "\n".join(texts)


def _either(said: Any, *names: str) -> Any:
    """A field under the name that this version of the package has for it."""
    return next(getattr(said, name) for name in names if hasattr(said, name))
