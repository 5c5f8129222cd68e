"""Tools of an MCP server, by the package ``mcp``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from easyrl.config import EnvironmentConfig, RewardConfig, ToolsConfig
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.runtime.process_guard import marked_processes
from tests.easyrl.environments.environment_cases import prompt, rollout, running, written
from tests.easyrl.environments.installed import folder_with, python_with
from tests.easyrl.environments.scripted_chat import ScriptedChat, calls, says

SERVER = '''
    import os
    import sys
    import time
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

    @server.tool()
    def variable(name: str) -> str:
        """A variable of its environment."""
        return os.environ.get(name, "not set")

    @server.tool()
    def process() -> str:
        """Its process."""
        return str(os.getpid())

    @server.tool()
    def die() -> str:
        """Ends its process."""
        os._exit(3)

    if __name__ == "__main__":
        server.run()
        if "STAYS" in os.environ:  # also without anybody that talks to it
            time.sleep(1000)
'''
# Takes no request without the header; says its port.
OVER_HTTP = """
    import socket
    import uvicorn
    from server import server

    inner = server.streamable_http_app()

    async def app(scope, receive, send):
        headers = dict(scope.get("headers") or ())
        if scope["type"] == "http" and headers.get(b"x-api-key") != b"MARKED":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await inner(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", PORT))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""
# Tells of one tool a page, in JSON-RPC written by hand: the package's own servers tell all at once.
PAGES = """
    import json
    import sys

    def tool(name):
        return {"name": name, "inputSchema": {"type": "object", "properties": {}}}

    for line in sys.stdin:
        asked = json.loads(line)
        given = asked.get("params") or {}
        if asked.get("method") == "initialize":
            said = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}},
                    "serverInfo": {"name": "pages", "version": "1"}}
        elif asked.get("method") == "tools/list":
            page = int(given.get("cursor") or 0)
            said = {"tools": [tool(f"tool_{page}")]} | (
                {"nextCursor": str(page + 1)} if page < 2 else {}
            )
        elif asked.get("method") == "tools/call":
            said = {"content": [{"type": "text", "text": given["name"]}]}
        else:
            continue
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""
NAMES = ["add", "fail", "variable", "process", "die"]


def command(folder: Path) -> list[str]:
    python = python_with(folder_with("mcp"), folder)
    return [str(python), str(written(folder, SERVER, "server.py"))]


def environment(folder: Path, **keys: Any) -> EnvironmentConfig:
    tools = ToolsConfig(command=command(folder), **keys)
    return EnvironmentConfig(name="sums", tools=[tools], rewards=[RewardConfig(name="exact")])


async def told(hosts: EnvironmentHosts, *asked: tuple[str, str]) -> list[str]:
    """What a model is told of calls that it makes one after another."""
    left = list(asked)

    def script(body: dict[str, Any]) -> dict[str, Any]:
        return calls(left.pop(0)) if left else says("done")

    async with ScriptedChat(script) as chat:
        await rollout(hosts, chat, prompt("?"))
        return [m["content"] for m in chat.bodies[-1]["messages"] if m["role"] == "tool"]


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
    assert names == NAMES
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
        with pytest.raises(EnvironmentFailed, match="no tool 'subtract'; it has add, fail, "):
            await hosts.start()
    finally:
        await hosts.close()


async def test_tools_that_are_told_in_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_with("mcp"))])
    command = [sys.executable, str(written(tmp_path, PAGES, "pages.py"))]
    tools, rewards = ToolsConfig(command=command), [RewardConfig(name="exact")]
    config = EnvironmentConfig(name="pages", tools=[tools], rewards=rewards)
    async with running(config) as hosts:
        assert await told(hosts, ("tool_0", "{}"), ("tool_2", "{}")) == ["tool_0", "tool_2"]


async def test_variables_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = environment(tmp_path, env={"GREETING": "hello there"})
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_with("mcp"))])
    monkeypatch.setenv("OF_THE_TRAINER", "secret")
    ask = [("variable", f'{{"name": "{name}"}}') for name in ("GREETING", "OF_THE_TRAINER", "PATH")]
    async with running(config) as hosts:
        greeting, other, path = await told(hosts, *ask)
    assert (greeting, other) == ("hello there", "not set")
    assert path == os.environ["PATH"]


async def test_a_server_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = environment(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_with("mcp"))])
    async with running(config) as hosts:
        (first,) = await told(hosts, ("process", "{}"))
        os.kill(int(first), signal.SIGKILL)
        sums = await asyncio.gather(*(told(hosts, ("add", '{"a": 1, "b": 2}')) for _ in range(8)))
        assert sums == [["3"]] * 8  # nobody was told an error
        second, died, third = await told(hosts, ("process", "{}"), ("die", "{}"), ("process", "{}"))
        assert len({first, second, third}) == 3
        assert died == "error: McpServerLost: the MCP server ended in this call, and once more"
        assert len(marked_processes(hosts._mark)) == 2  # the host, and one server
        await hosts.close()
        assert not _is_server(int(third))


async def test_a_server_that_does_not_come_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = environment(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_with("mcp"))])
    async with running(config) as hosts:
        (process,) = await told(hosts, ("process", "{}"))
        (tmp_path / "server.py").write_text("raise SystemExit(1)")
        os.kill(int(process), signal.SIGKILL)
        (said,) = await told(hosts, ("add", '{"a": 1, "b": 2}'))
        assert said.startswith("error: McpServerLost: the MCP server cannot be reached (")
        written(tmp_path, SERVER, "server.py")
        assert await told(hosts, ("add", '{"a": 1, "b": 2}')) == ["3"]


@contextmanager
def served_over_http(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    (python, _), script = command(folder), OVER_HTTP.replace("PORT", str(port))
    asked = [python, str(written(folder, script, "over_http.py"))]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        try:
            assert server.stdout is not None
            yield server, int(server.stdout.readline())
        finally:
            server.kill()


async def test_headers_and_a_server_over_http_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder_with("mcp"))])
    add = ("add", '{"a": 2, "b": 2}')
    with served_over_http(tmp_path) as (_, port):
        given = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Api-Key": "MARKED"}}
        tools, rewards = ToolsConfig.model_validate(given), [RewardConfig(name="exact")]
        refused = EnvironmentHosts(
            EnvironmentConfig(
                name="sums", tools=[tools.model_copy(update={"headers": {}})], rewards=rewards
            )
        )
        with pytest.raises(EnvironmentFailed):
            await refused.start()
        await refused.close()
        config = EnvironmentConfig(name="sums", tools=[tools], rewards=rewards)
        hosts = EnvironmentHosts(config)
        try:
            await hosts.start()
            assert await told(hosts, add) == ["4"]
        except BaseException:
            await hosts.close()
            raise
    try:
        (said,) = await told(hosts, add)
        assert said.startswith("error: McpServerLost: the MCP server cannot be reached (")
        with served_over_http(tmp_path, port):
            assert await told(hosts, add) == ["4"]
    finally:
        await hosts.close()


def test_a_trainer_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    config = environment(tmp_path, env={"STAYS": "yes"})
    source = f"""
        import asyncio, sys
        sys.path.append({str(folder_with("mcp"))!r})
        from easyrl.config import EnvironmentConfig
        from easyrl.environments.hosts import EnvironmentHosts

        async def main():
            settings = {config.model_dump(mode="json")!r}
            hosts = EnvironmentHosts(EnvironmentConfig.model_validate(settings))
            await hosts.start()
            print(hosts._mark, flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main())
    """
    code = textwrap.dedent(source)
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True) as trainer:
        assert trainer.stdout is not None
        mark = trainer.stdout.readline().strip()
        hosts = [psutil.Process(pid) for pid in marked_processes(mark)]
        servers = [child.pid for host in hosts for child in host.children()]
        assert any(map(_is_server, servers))
        os.kill(trainer.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 15
    while (left := [p for p in servers if _is_server(p)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == []


def _is_server(pid: int) -> bool:
    try:
        return any(part.endswith("server.py") for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


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
