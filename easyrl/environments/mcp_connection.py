"""A connection to an MCP server, by whichever version of the package ``mcp`` is installed."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from typing import Any

from easyrl.config import ToolsConfig
from easyrl.runtime.workers.child_process import MARK_PREFIX

LIFE_LIMIT_S = 5.0  # for a server to say that it is there


class McpPackage:
    """What is used of the package. Raises ``ImportError`` where there is none."""

    def __init__(self) -> None:
        try:
            self._mcp = import_module("mcp")
        except ImportError:
            raise ImportError(
                f"tools of an MCP server need the package mcp in {sys.executable}: pip install mcp"
            ) from None

    @asynccontextmanager
    async def session(self, config: ToolsConfig) -> AsyncIterator[Any]:
        """A ``ClientSession`` that the server has greeted."""
        async with self._transport(config) as (read, write, *_):
            async with self._mcp.ClientSession(read, write) as session:
                await session.initialize()
                yield session

    def page(self, session: Any, cursor: str) -> dict[str, Any]:
        """Arguments of ``list_tools`` for what follows ``cursor``."""
        if "params" in inspect.signature(session.list_tools).parameters:
            return {"params": self._mcp.types.PaginatedRequestParams(cursor=cursor)}
        return {"cursor": cursor}

    def _transport(self, config: ToolsConfig) -> AbstractAsyncContextManager[Any]:
        if config.command:
            return self._over_pipes(config)
        assert config.url is not None
        return self._over_http(config.url, dict(config.headers))

    def _over_pipes(self, config: ToolsConfig) -> AbstractAsyncContextManager[Any]:
        stdio = import_module("mcp.client.stdio")
        program, *arguments = config.command
        # The package passes on little of this process's environment; by the marks what is started
        # ends with the run, however that ends.
        marks = {name: value for name, value in os.environ.items() if name.startswith(MARK_PREFIX)}
        parameters = self._mcp.StdioServerParameters(
            command=program, args=arguments, env=marks | config.env
        )
        started: AbstractAsyncContextManager[Any] = stdio.stdio_client(parameters)
        return started

    @asynccontextmanager
    async def _over_http(self, url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
        known = vars(import_module("mcp.client.streamable_http"))
        if "streamable_http_client" in known:
            async with known["create_mcp_http_client"](headers=headers) as client:
                async with known["streamable_http_client"](url, http_client=client) as streams:
                    yield streams
        else:  # earlier versions of the package
            async with known["streamablehttp_client"](url, headers=headers) as streams:
                yield streams


class McpConnection:
    """A session with a server, open until ``close``; a lost one is not mended."""

    def __init__(self, session: Any, package: McpPackage, ended: asyncio.Event) -> None:
        self.session = session
        self._package, self._ended = package, ended

    @classmethod
    async def open(cls, config: ToolsConfig, package: McpPackage) -> McpConnection:
        """Starts or reaches the server. Raises what the package raises."""
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ended = asyncio.Event()
        keeping = asyncio.create_task(_keep(config, package, opened, ended))
        _KEEPING.add(keeping)  # a loop holds its tasks weakly
        keeping.add_done_callback(_KEEPING.discard)
        try:
            return cls(await opened, package, ended)
        except BaseException:  # also if nobody waits any more
            ended.set()
            raise

    async def list_tools(self) -> list[Any]:
        """All of its tools, whatever number of pages it tells them in."""
        listed, more = [], dict[str, Any]()
        while True:
            page = await self.session.list_tools(**more)
            listed += page.tools
            cursor = either(page, "next_cursor", "nextCursor")
            if not cursor:
                return listed
            more = self._package.page(self.session, cursor)

    async def lives(self) -> bool:
        """Whether the server answers another question: what failed was a call alone."""
        try:
            await asyncio.wait_for(self.session.list_tools(), LIFE_LIMIT_S)
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Ends the session, and the server that it has started; returns at once."""
        self._ended.set()


_KEEPING = set[asyncio.Task[None]]()


async def _keep(
    config: ToolsConfig, package: McpPackage, opened: asyncio.Future[Any], ended: asyncio.Event
) -> None:
    """Holds a session open: what the package opens has to be closed by the same task."""
    try:
        async with package.session(config) as session:
            if not opened.done():
                opened.set_result(session)
            await ended.wait()
    except Exception as error:
        if not opened.done():
            opened.set_exception(error)


def either(said: Any, *names: str) -> Any:
    """A field under the name that this version of the package has for it."""
    return next(getattr(said, name) for name in names if hasattr(said, name))
