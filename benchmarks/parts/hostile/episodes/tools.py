"""Tools that fail, called as the tool loop calls them, and what they say in a chat."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from benchmarks.parts.hostile.episodes.catalogue import behaviour
from benchmarks.parts.hostile.episodes.scene import Scene
from easyrl.environments.client import ToolCall
from easyrl.environments.tools import FunctionTool, Tools

TIMEOUT_S = 0.3


def hang(question: str) -> str:
    """Never answers."""
    time.sleep(1000)
    return question


async def hang_without_end(question: str) -> str:
    """Never answers, in the event loop's own way."""
    await asyncio.Event().wait()
    return question


def fail(question: str) -> str:
    """Raises."""
    raise ValueError(question * 100_000)


def leave(question: str) -> str:
    """Ends the interpreter."""
    raise SystemExit(question)


def say_no_json(question: str) -> Any:
    """Returns what nobody can write down."""
    return {question: object(), "self": {1, 2}, 3: b"\xff"}


def say_too_much(question: str) -> str:
    """Returns ten megabytes."""
    return question * 10**7


@behaviour("tool")
async def tools_that_hang(scene: Scene) -> float:
    """Tools without an end, one of them in a thread."""
    return await _talk(scene, "took longer", hang, hang_without_end)


@behaviour("tool")
async def tools_that_raise(scene: Scene) -> float:
    """Tools that raise, and that end the interpreter."""
    return await _talk(scene, "error: ", fail, leave)


@behaviour("tool")
async def tools_that_say_no_json(scene: Scene) -> float:
    """Tools whose results are no JSON, or have ten million characters."""
    return await _talk(scene, "", say_no_json, say_too_much)


@behaviour("tool")
async def calls_that_are_none(scene: Scene) -> float:
    """Calls of tools that there are not, with arguments that are no JSON, or others'."""
    tools = _tools(fail)
    for name, arguments in (
        ("nothing", "{}"),
        ("fail", "{"),
        ("fail", "[]"),
        ("fail", '{"question": 1e400, "more": 1}'),
        ("fail", "null"),
        ("fail", '{"question": ' + "[" * 5000),
    ):
        said, is_error = await tools.answer(ToolCall("1", name, arguments))
        scene.check(is_error and said.startswith("error"), said)
    return await _talk(scene, "error: ", fail)


async def _talk(scene: Scene, expected: str, *functions: Any) -> float:
    """A chat in which each of ``functions`` is called, and the model reads the beginning of it."""
    tools = _tools(*functions)
    calls = [ToolCall(str(n), f.__name__, '{"question": "1"}') for n, f in enumerate(functions)]
    answers = await asyncio.gather(*map(tools.answer, calls))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "12"}]
    messages.append(await scene.chat(messages))
    for said, _ in answers:
        scene.check(expected in said and len(said) < 30_000, said[:200])
        json.dumps(said)
        messages.append({"role": "user", "content": said[:16]})
    messages.append(await scene.chat(messages))
    scene.happened()
    return scene.reward


def _tools(*functions: Any) -> Tools:
    return Tools([FunctionTool(function, TIMEOUT_S) for function in functions])
