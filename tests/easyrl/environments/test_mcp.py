"""Tools of an MCP server, by the package ``mcp``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from easyrl.config import EnvironmentConfig, RewardConfig, ToolsConfig
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from tests.easyrl.environments.environment_cases import prompt, rollout, running, written
from tests.easyrl.environments.installed import folder_with, python_with
from tests.easyrl.environments.scripted_chat import ScriptedChat, calls, says

SERVER = '''
    try:
        from mcp.server.fastmcp import FastMCP as Server
    except ImportError:
        from mcp.server.mcpserver import MCPServer as Server

    server = Server("sums")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Adds two integers."""
        return str(a + b)

    @server.tool()
    def fail() -> str:
        """Fails."""
        raise ValueError("no luck")

    server.run()
'''


def environment(folder: Path, **keys: Any) -> EnvironmentConfig:
    python = python_with(folder_with("mcp"), folder)
    command = [str(python), str(written(folder, SERVER, "server.py"))]
    tools = ToolsConfig(command=command, **keys)
    return EnvironmentConfig(name="sums", tools=[tools], rewards=[RewardConfig(name="exact")])


async def test_tools_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([calls(("add", '{"a": 2, "b": 2}'), ("fail", "{}"), ("add", '{"a": 1}'))])

    def script(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][-1]["role"] == "user":
            return next(turns)
        return says(body["messages"][2]["content"])

    config = environment(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_with("mcp"))])
    async with ScriptedChat(script) as chat, running(config) as hosts:
        outcome = await rollout(hosts, chat, prompt("2 + 2?", answer="4"))
    assert outcome.reward == 1.0
    assert outcome.components["tool_errors"] == 2.0
    names = [tool["function"]["name"] for tool in chat.bodies[0]["tools"]]
    assert names == ["add", "fail"]
    parameters = chat.bodies[0]["tools"][0]["function"]["parameters"]
    assert sorted(parameters["properties"]) == ["a", "b"]
    answers = [m["content"] for m in chat.bodies[1]["messages"] if m["role"] == "tool"]
    assert answers[0] == "4"
    assert answers[1].startswith("error: McpToolFailed: ") and answers[2].startswith("error: ")


async def test_a_tool_that_the_server_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = environment(tmp_path, functions=["subtract"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_with("mcp"))])
    hosts = EnvironmentHosts(config)
    try:
        with pytest.raises(EnvironmentFailed, match="no tool 'subtract'; it has add, fail"):
            await hosts.start()
    finally:
        await hosts.close()


async def test_the_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    written(missing, "raise ImportError", "mcp.py")
    monkeypatch.syspath_prepend(missing)
    tools = ToolsConfig(command=["true"])
    rewards = [RewardConfig(name="exact")]
    hosts = EnvironmentHosts(EnvironmentConfig(name="sums", tools=[tools], rewards=rewards))
    try:
        with pytest.raises(EnvironmentFailed, match="need the package mcp in .*: pip install mcp"):
            await hosts.start()
    finally:
        await hosts.close()
