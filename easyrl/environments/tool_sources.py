"""Where tools come from: functions of a Python file, or an MCP server."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from pathlib import Path

from easyrl.config import ToolsConfig
from easyrl.environments.mcp_tools import McpServer
from easyrl.environments.tools import FunctionTool, Tool
from easyrl.runtime.user_code import definition, run_file


class ToolSource(ABC):
    """Some tools, once they are opened."""

    @abstractmethod
    async def open(self) -> list[Tool]: ...


class FileTools(ToolSource):
    """Functions of a Python file. Raises ``ValueError`` naming what cannot be a tool."""

    def __init__(self, file: Path, functions: list[str], timeout_s: float) -> None:
        file = file.resolve()
        module = vars(run_file(file, f"easyrl_tools_{file.stem}"))
        own = {
            name: value
            for name, value in module.items()
            if inspect.isfunction(value)
            and not name.startswith("_")
            and value.__module__ == f"easyrl_tools_{file.stem}"
        }
        if missing := [name for name in functions if not callable(module.get(name))]:
            raise ValueError(
                f"{file} defines no {missing[0]!r}; its functions: {', '.join(own) or '-'}; name "
                "one of them, or define it"
            )
        chosen = {name: module[name] for name in functions} or own
        if not chosen:
            raise ValueError(f"{file} defines no public function; define a tool in it")
        self._tools: list[Tool] = [
            FunctionTool(function, timeout_s, definition(function) or str(file))
            for function in chosen.values()
        ]

    async def open(self) -> list[Tool]:
        return self._tools


class McpTools(ToolSource):
    """Tools of an MCP server."""

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        self._server = McpServer(config)

    async def open(self) -> list[Tool]:
        tools = await self._server.tools()
        wanted = self._config.functions
        if missing := [name for name in wanted if name not in {tool.name for tool in tools}]:
            names = ", ".join(tool.name for tool in tools) or "-"
            raise ValueError(f"the MCP server has no tool {missing[0]!r}; it has {names}")
        return [tool for tool in tools if not wanted or tool.name in wanted]


def tools_of(config: ToolsConfig) -> ToolSource:
    """Raises ``ImportError`` or ``ValueError`` where they cannot be used."""
    if config.file is not None:
        return FileTools(config.file, config.functions, config.timeout_s)
    return McpTools(config)
