"""Threads that hang in a host: counted, and renewed with it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from easyrl.config import EnvironmentConfig
from easyrl.environments import hosts as hosts_module
from easyrl.environments.host_threads import HostThreads
from easyrl.environments.hosts import EnvironmentHosts
from tests.easyrl.environments.environment_cases import coroutine, rollout, running, written
from tests.easyrl.environments.scripted_chat import ScriptedChat, calls, says
from tests.waiting import until

# a tool in asyncio's own threads, of which it has a few for each core
TO_THREAD = """
import asyncio, os, time

async def rollout(client, prompt):
    seconds = 60 if prompt.text == "hang" else 0
    try:
        await asyncio.wait_for(asyncio.to_thread(time.sleep, seconds), 0.2)
    except TimeoutError:
        return {"reward": 0.0, "components": {"pid": os.getpid()}}
    return {"reward": 1.0, "components": {"pid": os.getpid()}}
"""
TOOLS = """
import time

def wait(seconds: float) -> str:
    \"\"\"Waits.\"\"\"
    time.sleep(seconds)
    return "done"
"""


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(hosts_module, "MOST_HUNG_THREADS", 4)
    return 4


async def test_hung_threads_do_not_fill_the_pool_and_their_host_is_replaced(
    tmp_path: Path, few_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, TO_THREAD)) as hosts:
        pid = (await rollout(hosts, chat)).components["pid"]
        hung = await asyncio.gather(*(rollout(hosts, chat, "hang") for _ in range(40)))
        assert {each.components["pid"] for each in hung} == {pid}
        assert (await rollout(hosts, chat)).reward == 1.0  # asyncio's own pool would have none left
        await until(lambda: hosts.num_hung_threads == 40)
        renewed = await rollout(hosts, chat)
        assert renewed.reward == 1.0 and renewed.components["pid"] != pid
        assert hosts.num_replaced == 1
        await until(lambda: hosts.num_hung_threads == 0)  # they have ended with their process
    assert (
        "environment test: 40 calls hang in threads of its host, which is replaced" in caplog.text
    )


async def test_so_is_that_of_tools_that_hang(tmp_path: Path, few_threads: int) -> None:
    config = EnvironmentConfig(
        name="tools",
        tools=[{"file": written(tmp_path, TOOLS, "waits.py"), "timeout_s": 0.3}],  # type: ignore[list-item]
        rewards=[{"name": "exact"}],  # type: ignore[list-item]
    )

    def answer(body: dict[str, Any]) -> Any:
        is_first = body["messages"][-1]["role"] == "user"
        return calls(("wait", '{"seconds": 60}')) if is_first else says("4")

    async with ScriptedChat(answer) as chat, running(config) as hosts:
        assert isinstance(hosts, EnvironmentHosts)
        made = await asyncio.gather(*(rollout(hosts, chat, session=str(n)) for n in range(6)))
        assert [each.components["tool_errors"] for each in made] == [1.0] * 6
        await until(lambda: hosts.num_hung_threads == 6)
        await rollout(hosts, chat)
        assert hosts.num_replaced == 1
        await until(lambda: hosts.num_hung_threads <= 1)


async def test_a_call_that_is_waited_for_does_not_hang() -> None:
    threads = HostThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    slow = [asyncio.create_task(asyncio.to_thread(time.sleep, 0.5)) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert threads.num_hung == 0
    slow[0].cancel()
    await asyncio.sleep(0.05)
    assert threads.num_hung == 1
    await asyncio.gather(*slow, return_exceptions=True)
    await until(lambda: threads.num_hung == 0)
