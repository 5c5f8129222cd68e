"""Rollouts in host processes: what they are given, what they answer, and all that goes wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from easyrl.config import EnvironmentConfig
from easyrl.environments.failures import (
    EnvironmentFailed,
    EnvironmentUnreachable,
    HostDied,
    OutOfTurns,
    RolloutHung,
)
from easyrl.environments.host_process import Outcome
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.runtime.process_guard import marked_processes
from tests.easyrl.environments.environment_cases import (
    coroutine,
    prompt,
    rollout,
    running,
    written,
)
from tests.easyrl.environments.scripted_chat import ScriptedChat, refuses, says

ROOT = Path(__file__).parents[3]

WITH_OPENAI = """
    async def rollout(client, prompt):
        reply = await client.chat.completions.create(model=prompt.model, messages=prompt.messages)
        return float(reply.choices[0].message.content == "echo hello")
"""

# what a rollout does is said by its prompt
BEHAVIOURS = """
    import asyncio, os, subprocess, sys, time
    from easyrl.environments.client import Client

    async def rollout(client: Client, prompt):
        await client.chat(prompt.messages)
        if prompt.text == "raise":
            raise KeyError("no such thing")
        if prompt.text == "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(failing())
        if prompt.text == "exit":
            sys.exit(3)
        if prompt.text == "die":
            os._exit(3)
        if prompt.text == "hang":
            await asyncio.sleep(1000)
        if prompt.text == "block":
            time.sleep(1000)
        if prompt.text == "stubborn":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        if prompt.text == "late":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                return 1.0
        if prompt.text == "wait":
            await asyncio.sleep(1.5)
        if prompt.text == "nan":
            return float("nan")
        if prompt.text == "words":
            return {"reward": "much"}
        if prompt.text == "none":
            return None
        if prompt.text == "huge":
            return {"reward": 1.0, "turn_rewards": [1e39]}
        if prompt.text == "surrogate":
            raise ValueError("half of a pair: \\ud83d")
        if prompt.text == "untold":
            raise Untold
        if prompt.text == "fork":
            if os.fork() == 0:
                os.setsid()
                time.sleep(1000)
            os._exit(3)
        if prompt.text.startswith("forge "):
            os.write(int(sys.argv[1]), prompt.text.removeprefix("forge ").encode() + b"\\n")
            await asyncio.sleep(1000)
        if prompt.text == "print":
            print("from print")
            os.write(1, b'{"type": "done", "id": 0, "reward": 9}\\n')
            subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        if prompt.text == "flood":
            for _ in range(2000):
                os.write(1, b"x" * 16000 + b"\\n")
        if prompt.text == "child":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return {"reward": 0.5, "components": {"pid": os.getpid()}, "turn_rewards": [0.25, 0.25]}

    async def failing():
        raise OSError("a leaf of a group")

    class Untold(Exception):
        def __str__(self):
            raise KeyError
"""


async def test_a_coroutine_with_the_openai_client(tmp_path: Path) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, WITH_OPENAI)) as hosts:
        assert await rollout(hosts, chat) == Outcome(1.0)
        assert await rollout(hosts, chat, "other", session="t") == Outcome(0.0)
    assert chat.sessions == ["s", "t"]
    assert chat.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert chat.bodies[0]["model"] == "policy"


async def test_what_a_rollout_is_given(tmp_path: Path) -> None:
    source = """
        from easyrl.environments import client as ours

        async def play(client: "ours.Client", prompt):
            reply = await client.chat(prompt.messages, max_tokens=5)
            made = await client.generate([1, 2], max_tokens=2)
            assert made.token_ids == [2, 3] and made.logprobs == [-0.5, -0.5]
            assert prompt.metadata["when"] == "2026-01-02", prompt
            return {
                "reward": prompt.answer == "four" and reply.text == "echo 2 + 2?",
                "components": {"index": prompt.index, "epoch": prompt.epoch, "seed": prompt.seed},
            }
    """
    asked = prompt(
        "2 + 2?", 3, answer="four", epoch=2, system="Be brief.", metadata={"when": "2026-01-02"}
    )
    environment = coroutine(tmp_path, source, function="play")
    async with ScriptedChat() as chat, running(environment) as hosts:
        outcome = await rollout(hosts, chat, asked)
    assert outcome == Outcome(1.0, {"index": 3.0, "epoch": 2.0, "seed": 7.0})
    assert chat.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert chat.bodies[0]["max_tokens"] == 5
    assert chat.bodies[1] == {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}


async def test_many_rollouts_at_once_and_several_hosts(tmp_path: Path) -> None:
    environment = coroutine(tmp_path, BEHAVIOURS, num_hosts=2)
    async with ScriptedChat(delay_s=0.2) as chat, running(environment) as hosts:
        start_s = time.monotonic()
        outcomes = await asyncio.gather(*(rollout(hosts, chat, session=str(n)) for n in range(100)))
        assert time.monotonic() - start_s < 10  # 20 s one after another
        assert hosts.num_rollouts == 0
    assert len({outcome.components["pid"] for outcome in outcomes}) == 2
    assert sorted(chat.sessions, key=int) == [str(n) for n in range(100)]
    assert all(outcome.turn_rewards == (0.25, 0.25) for outcome in outcomes)


@pytest.mark.parametrize(
    ("behaviour", "says_so"),
    [
        ("raise", r"environment test: \S*environment.py:8: KeyError: 'no such thing'$"),
        ("group", r"environment.py:\d+: OSError: a leaf of a group$"),
        ("exit", r"environment.py:13: SystemExit: 3$"),
        ("nan", r"reward is nan; it has to be a finite number \(float32\)$"),
        ("words", r"reward is 'much'; it has to be a finite number \(float32\)$"),
        ("none", r"the rollout returned None; return a number, or a mapping"),
    ],
)
async def test_what_raises_says_where_and_harms_nobody_else(
    behaviour: str, says_so: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        before = await rollout(hosts, chat)
        other = asyncio.create_task(rollout(hosts, chat, "wait"))
        with pytest.raises(EnvironmentFailed, match=says_so) as raised:
            await rollout(hosts, chat, behaviour)
        assert not isinstance(raised.value, HostDied)
        assert "\n" not in str(raised.value)
        assert (await other).components == before.components  # the same process
    (record,) = (r for r in caplog.records if "Traceback" in r.getMessage())
    assert record.name == "easyrl.environments.host_process"


async def test_an_error_of_the_gateway_is_the_rollout_s(tmp_path: Path) -> None:
    async with ScriptedChat(lambda _: refuses(400, "temperature is training's")) as chat:
        async with running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
            with pytest.raises(EnvironmentFailed, match="400: temperature is training's"):
                await rollout(hosts, chat)


OUT_OF_TURNS = """
    import openai

    class AgentError(Exception): ...

    async def rollout(client, prompt):
        turns = []
        try:
            while True:
                reply = await client.chat.completions.create(
                    model=prompt.model, messages=prompt.messages
                )
                turns.append(reply.id)
        except openai.BadRequestError as error:
            if prompt.text == "wraps":
                raise AgentError("no further turn") from error
            if prompt.text == "group":
                raise ExceptionGroup("several agents", [ValueError(), error])
            if prompt.text == "fault":
                turns[99]
            if prompt.text == "passes":
                raise
        return {"reward": 0.5, "turn_rewards": dict.fromkeys(turns, 0.25)}
"""


@pytest.mark.parametrize("behaviour", ["passes", "wraps", "group", "fault", "returns"])
async def test_a_refused_turn_that_a_rollout_lets_pass_is_told_apart(
    behaviour: str, tmp_path: Path
) -> None:
    answers = iter([says("one"), says("two"), refuses(400, "2 turns", "max_turns_exceeded")])
    async with ScriptedChat(lambda _: next(answers)) as chat:
        async with running(coroutine(tmp_path, OUT_OF_TURNS)) as hosts:
            if behaviour == "returns":
                outcome = await rollout(hosts, chat, behaviour)
                assert outcome.turn_rewards == {"chatcmpl-1": 0.25, "chatcmpl-2": 0.25}
                return
            with pytest.raises(EnvironmentFailed) as raised:
                await rollout(hosts, chat, behaviour)
    assert isinstance(raised.value, OutOfTurns) == (behaviour != "fault")


async def test_a_host_that_dies_fails_its_own_rollouts_and_is_replaced(tmp_path: Path) -> None:
    environment = coroutine(tmp_path, BEHAVIOURS, num_hosts=2)
    async with ScriptedChat() as chat, running(environment) as hosts:
        first = asyncio.create_task(rollout(hosts, chat, "wait"))
        await asyncio.sleep(0.1)  # the fewest rollouts: the other host is next
        with pytest.raises(HostDied, match="environment test: its host process ended: exit code 3"):
            await rollout(hosts, chat, "die")
        again = await rollout(hosts, chat)
        assert again.components["pid"] != (await first).components["pid"]
        with pytest.raises(HostDied):
            await asyncio.gather(rollout(hosts, chat, "die"), rollout(hosts, chat, "wait"))


async def test_what_hangs_is_cancelled_and_the_others_go_on(tmp_path: Path) -> None:
    environment = coroutine(tmp_path, BEHAVIOURS, idle_timeout_s=0.6)
    async with ScriptedChat() as chat, running(environment) as hosts:
        pid = (await rollout(hosts, chat)).components
        with pytest.raises(RolloutHung, match="made no request for 0.6 s and was cancelled"):
            await rollout(hosts, chat, "hang", session="hang")
        assert (await rollout(hosts, chat)).components == pid


async def test_a_slow_answer_is_no_hanging_rollout(tmp_path: Path) -> None:
    environment = coroutine(tmp_path, BEHAVIOURS, idle_timeout_s=0.4)
    async with ScriptedChat(delay_s=1.5) as chat, running(environment) as hosts:
        assert (await rollout(hosts, chat)).reward == 0.5


DAWDLING = """
import asyncio
from easyrl.environments.client import Client

async def rollout(client: Client, prompt):
    for turn in range(8 if prompt.text == "slow" else 1):
        await asyncio.sleep(0.5)
        await client.chat([{"role": "user", "content": f"turn {turn}"}])
    return turn + 1.0
"""


async def test_nothing_is_cut_because_it_is_slow(tmp_path: Path) -> None:
    """More than twice as long as it may be without a request, and all others have ended."""
    environment = coroutine(tmp_path, DAWDLING, idle_timeout_s=1.5)
    async with ScriptedChat() as chat, running(environment) as hosts:
        slow = asyncio.create_task(rollout(hosts, chat, "slow", session="slow"))
        quick = await asyncio.gather(*(rollout(hosts, chat, "quick") for _ in range(7)))
        assert [each.reward for each in quick] == [1.0] * 7 and not slow.done()
        assert (await slow).reward == 8.0


async def test_a_host_that_blocks_is_killed_and_what_comes_then_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easyrl.environments.host_process.ALIVE_S", 1.5)
    environment = coroutine(tmp_path, BEHAVIOURS, idle_timeout_s=2.0)
    async with ScriptedChat() as chat, running(environment) as hosts:
        pid = (await rollout(hosts, chat)).components
        with pytest.raises(RolloutHung):
            await rollout(hosts, chat, "block", session="block")
        assert (await rollout(hosts, chat)).components != pid


async def test_what_a_blocked_host_takes_with_it_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easyrl.environments.host_process.ALIVE_S", 1.5)
    environment = coroutine(tmp_path, BEHAVIOURS, idle_timeout_s=2.0)
    async with ScriptedChat() as chat, running(environment) as hosts:
        others = [asyncio.create_task(rollout(hosts, chat, "wait", session="w")) for _ in range(3)]
        await asyncio.sleep(0.5)
        blocks = asyncio.create_task(rollout(hosts, chat, "block", session="block"))
        ended = await asyncio.gather(*others, blocks, return_exceptions=True)
        assert [type(each) for each in ended] == [HostDied] * 4
        with pytest.raises(RolloutHung):
            await hosts.run(
                chat.session("b"), chat.key, prompt("block"), 0, lambda: 9.0, alone=True
            )


async def test_a_rollout_alone_has_a_host_that_ends_with_it(tmp_path: Path) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        pid = (await rollout(hosts, chat)).components["pid"]
        own = await hosts.run(chat.session("a"), chat.key, prompt("x"), 0, lambda: 0.0, alone=True)
        assert own.components["pid"] != pid
        process = psutil.Process(int(own.components["pid"]))
        await asyncio.to_thread(psutil.wait_procs, [process], 5)
        assert not process.is_running()
        with pytest.raises(HostDied):
            await hosts.run(chat.session("d"), chat.key, prompt("die"), 0, lambda: 0.0, alone=True)
        assert (await rollout(hosts, chat)).components["pid"] == pid


async def test_a_fork_that_keeps_the_socket_does_not_keep_the_host(tmp_path: Path) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        with pytest.raises(HostDied, match="exit code 3"):
            await asyncio.wait_for(rollout(hosts, chat, "fork"), 20)
        assert (await rollout(hosts, chat)).reward == 0.5


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "7",
        '{"id": 0}',
        '{"type": "output"}',
        '{"type": "done", "id": 0, "reward": "much", "components": {}, "turn_rewards": []}',
        '{"type": "done", "id": 0, "reward": 1, "components": {}, "turn_rewards": ["a"]}',
        '{"type": "done", "id": [], "reward": 1}',
        '{"type": "failed", "id": 0}',
    ],
)
async def test_lines_that_are_no_messages_end_the_host(line: str, tmp_path: Path) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        with pytest.raises(HostDied, match="sent what no host sends"):
            await asyncio.wait_for(rollout(hosts, chat, f"forge {line}"), 20)
        assert (await rollout(hosts, chat)).reward == 0.5


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("huge", "turn_rewards is 1e\\+39"),
        ("surrogate", "half of a pair: \\?"),
        ("untold", "Untold \\(its text raises KeyError\\)"),
    ],
)
async def test_what_cannot_be_told_is_a_failure_and_the_host_goes_on(
    behaviour: str, said: str, tmp_path: Path
) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        pid = (await rollout(hosts, chat)).components
        with pytest.raises(EnvironmentFailed, match=said):
            await asyncio.wait_for(rollout(hosts, chat, behaviour), 20)
        assert (await rollout(hosts, chat)).components == pid


async def test_a_rollout_that_ignores_its_end_costs_no_other(tmp_path: Path) -> None:
    environment = coroutine(tmp_path, BEHAVIOURS, idle_timeout_s=0.6)
    async with ScriptedChat() as chat, running(environment) as hosts:
        pid = (await rollout(hosts, chat)).components
        hanging = asyncio.create_task(rollout(hosts, chat, "stubborn", session="stubborn"))
        await asyncio.sleep(0.6)
        # the idle time of this one begins later; it is answered by the host that is given up
        waits = asyncio.create_task(
            hosts.run(chat.session("w"), chat.key, prompt("wait"), 0, lambda: 0.0)
        )
        with pytest.raises(RolloutHung):
            await hanging
        assert (await rollout(hosts, chat)).components != pid
        assert (await waits).components == pid
        process = psutil.Process(int(pid["pid"]))
        await asyncio.to_thread(psutil.wait_procs, [process], 5)
        assert not process.is_running()


async def test_a_cancelled_rollout_ends_and_what_it_says_then_is_ignored(tmp_path: Path) -> None:
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        pid = (await rollout(hosts, chat)).components
        for behaviour in ("hang", "late"):
            task = asyncio.create_task(rollout(hosts, chat, behaviour))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.sleep(
            0.8
        )  # longer than the grace: both have ended, so that it is not replaced
        assert hosts.num_rollouts == 0
        assert (await rollout(hosts, chat)).components == pid


async def test_what_is_printed_does_not_disturb_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # as a run shows its log
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        assert (await rollout(hosts, chat, "print")).reward == 0.5
        await asyncio.sleep(1.2)  # what its child printed comes with the beat at the latest
    assert "from print" in caplog.text and "from a child" in caplog.text


async def test_a_flood_is_dropped_where_it_rises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with ScriptedChat() as chat, running(coroutine(tmp_path, BEHAVIOURS)) as hosts:
        start_s = time.monotonic()
        assert (await rollout(hosts, chat, "flood")).reward == 0.5  # 32 MB
        seconds = time.monotonic() - start_s
        await asyncio.sleep(1.2)
    assert "bytes more" in caplog.text
    assert len(caplog.text) < (seconds + 5) * 10_000


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    environment = coroutine(tmp_path, BEHAVIOURS)
    async with ScriptedChat() as chat:
        async with running(environment) as hosts:
            await rollout(hosts, chat, "child")
            mark = hosts._mark
            assert len(marked_processes(mark)) == 2  # the host, and what it has started
            task = asyncio.create_task(rollout(hosts, chat, "hang"))
            await asyncio.sleep(0.2)
        assert marked_processes(mark) == []
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RuntimeError, match="the hosts of environment test do not run"):
            await rollout(hosts, chat)


def test_a_trainer_that_is_killed_leaves_no_host(tmp_path: Path) -> None:
    file = written(tmp_path, BEHAVIOURS)
    source = f"""
        import asyncio
        from easyrl.config import EnvironmentConfig
        from easyrl.environments.hosts import EnvironmentHosts

        async def main():
            hosts = EnvironmentHosts(EnvironmentConfig(name="test", file={str(file)!r}))
            await hosts.start()
            print(hosts._mark, flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main())
    """
    code = textwrap.dedent(source)
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        mark = trainer.stdout.readline().strip()
        assert len(marked_processes(mark)) == 1
        os.kill(trainer.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while (left := marked_processes(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize(
    ("source", "says_so"),
    [
        ("def rollout(client, prompt):\n    return 1.0\n", "define it as async def rollout"),
        ("x = 1\n", "has nothing called 'rollout'"),
        ("import nothing_of_that_name\n", r"environment.py:1: ModuleNotFoundError"),
        ("async def rollout(client): ...\n", "is called with \\(client, prompt\\)"),
        ("async def rollout(client, prompt)\n", r"environment.py:1: SyntaxError: expected ':'"),
        ("import os; os._exit(4)\n", "its host process ended: exit code 4"),
    ],
)
async def test_what_cannot_be_loaded_is_said_at_the_start(
    source: str, says_so: str, tmp_path: Path
) -> None:
    file = tmp_path / "environment.py"
    file.write_text(source)
    hosts = EnvironmentHosts(EnvironmentConfig(name="test", file=file))
    try:
        with pytest.raises(EnvironmentFailed, match=says_so):
            await hosts.start()
    finally:
        await hosts.close()


async def test_an_environment_that_loads_for_too_long(tmp_path: Path) -> None:
    environment = coroutine(tmp_path, "import time; time.sleep(1000)", start_timeout_s=0.5)
    hosts = EnvironmentHosts(environment)
    try:
        with pytest.raises(EnvironmentFailed, match="not loaded within 0.5 s.*start_timeout_s"):
            await hosts.start()
    finally:
        await hosts.close()


async def test_openai_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "openai.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path / "missing")
    hosts = EnvironmentHosts(coroutine(tmp_path, WITH_OPENAI))
    try:
        with pytest.raises(EnvironmentFailed, match="pip install openai there, or annotate"):
            await hosts.start()
    finally:
        await hosts.close()


async def test_an_environment_with_a_python_of_its_own(tmp_path: Path) -> None:
    """Isolated from ours: nothing of the project can be imported there."""
    python = written(tmp_path, f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', "python")
    python.chmod(0o755)
    source = """
        import importlib.util, json, urllib.request

        async def rollout(client, prompt):
            assert importlib.util.find_spec("easyrl") is None
            return 1.0
    """
    # without site-packages there is no openai either; a stand-in shows what is made of it
    written(
        tmp_path,
        "def Timeout(*_, **__): ...\n"
        "class AsyncOpenAI:\n"
        "    def __init__(self, **k): ...\n"
        "    def with_options(self, **k): return self\n",
        "openai.py",
    )
    environment = EnvironmentConfig(name="test", file=written(tmp_path, source), python=python)
    async with ScriptedChat() as chat, running(environment) as hosts:
        assert await rollout(hosts, chat) == Outcome(1.0)


def test_the_protocol_by_hand(tmp_path: Path) -> None:
    """Over standard input and output, without the trainer's side."""
    file = written(tmp_path, "async def rollout(client, prompt):\n    return len(prompt.text)\n")
    host = ROOT / "easyrl/environments/host.py"
    settings = {"file": str(file), "function": "rollout"}
    greeting = {"type": "environment", "kind": "coroutine", "settings": settings, "path": sys.path}
    asked = {"text": "four", "messages": [], "answer": None, "metadata": {}, "index": 0}
    asked |= {"epoch": 0, "is_held_out": False}
    start = {"type": "start", "id": 5, "base_url": "http://127.0.0.1:1", "api_key": "k"}
    start |= {"model": "policy", "prompt": asked, "seed": 1}
    with subprocess.Popen([sys.executable, host], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(greeting) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["type"] == "ready"
        process.stdin.write(json.dumps(start) + "\n")
        process.stdin.flush()
        said = [json.loads(process.stdout.readline())]
        while said[-1]["type"] in ("beat", "output"):
            said.append(json.loads(process.stdout.readline()))
        assert said[-1] == {
            "type": "done",
            "id": 5,
            "reward": 4.0,
            "components": {},
            "turn_rewards": [],
            "tool_calls": [],
        }
        process.stdin.close()
        assert process.wait(10) == 0


UNREACHABLE = """
import errno
import socket

async def rollout(client, prompt):
    try:
        if prompt.text == "refused":
            socket.create_connection(("127.0.0.1", 1), timeout=1)
        if prompt.text == "unknown":
            raise socket.gaierror(-2, "Name or service not known")
        if prompt.text == "no route":
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        if prompt.text == "no file":
            open("/no/such/file")
    except OSError as error:
        raise RuntimeError("the sandbox could not be made") from error
"""


@pytest.mark.parametrize("why", ["refused", "unknown", "no route", "no file"])
async def test_a_connection_that_cannot_be_had_is_told_apart(tmp_path: Path, why: str):
    environment = coroutine(tmp_path, UNREACHABLE)
    async with ScriptedChat() as chat, running(environment) as hosts:
        with pytest.raises(EnvironmentFailed, match="the sandbox could not be made") as caught:
            await rollout(hosts, chat, why)
    assert isinstance(caught.value, EnvironmentUnreachable) == (why != "no file")
