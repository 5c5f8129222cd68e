"""Tools and the loop in which a model calls them.

What goes wrong in a tool is a message to the model, and the end of the context or of the turns an
end as any other, ``length``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from easyrl.environments.call_threads import ThreadsHang, in_thread
from easyrl.environments.client import Client, RequestFailed, ToolCall
from easyrl.environments.tool_schema import BadArguments, FunctionSchema, as_tool

MOST_RESULT_CHARACTERS = 20_000
# name of a tool, start and end (time.monotonic), whether the model was told of an error
OnCall = Callable[[str, float, float, bool], object]


class Tool(ABC):
    """One that a model can call."""

    name: str
    schema: dict[str, Any]  # as a chat request has it
    timeout_s: float

    @abstractmethod
    async def call(self, arguments: str) -> str:
        """What it says to arguments as the model wrote them; the model reads what it raises."""


class FunctionTool(Tool):
    """A typed Python function. A plain one runs in a thread, which cannot be ended."""

    def __init__(self, function: Callable[..., Any], timeout_s: float, where: str = "") -> None:
        self._function, self._schema = function, FunctionSchema(function, where)
        self.name, self.timeout_s = self._schema.name, timeout_s
        self.schema = as_tool(self.name, self._schema.description, self._schema.parameters)

    async def call(self, arguments: str) -> str:
        given = self._schema.arguments(arguments)
        if inspect.iscoroutinefunction(self._function):
            return as_text(await self._function(**given))
        result = await in_thread(lambda: self._function(**given))
        return as_text(await result if inspect.isawaitable(result) else result)


class Tools:
    """Those of an environment, by name. Raises ``ValueError`` if two are called the same."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            raise ValueError(f"tools: two are called the same ({', '.join(names)}); rename one")
        self.schemas = [tool.schema for tool in tools]

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    async def answer(self, call: ToolCall) -> tuple[str, bool]:
        """What the model is told of its call, and whether that is an error."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; use {', '.join(self._tools)}", True
        try:
            text = await asyncio.wait_for(tool.call(call.arguments), tool.timeout_s)
        except ThreadsHang:
            raise
        except BadArguments as error:
            return f"error: {error}"[:MOST_RESULT_CHARACTERS], True
        except TimeoutError:
            return f"error: {call.name} took longer than {tool.timeout_s:g} s", True
        except Exception as error:
            said = f"error: {type(error).__name__}: {error}".removesuffix(": ")
            return said[:MOST_RESULT_CHARACTERS], True
        if len(text) > MOST_RESULT_CHARACTERS:
            more = len(text) - MOST_RESULT_CHARACTERS
            text = f"{text[:MOST_RESULT_CHARACTERS]}\n({more} characters more)"
        return text, False


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """How a tool loop ended."""

    text: str  # of the last message
    ended: str  # "stop"; "length": a message was cut off, or there are no turns or context left
    num_turns: int
    num_calls: int
    num_errors: int  # calls that were answered by an error

    @property
    def components(self) -> dict[str, float]:
        """As metrics."""
        return {
            "turns": float(self.num_turns),
            "tool_calls": float(self.num_calls),
            "tool_errors": float(self.num_errors),
            "length": float(self.ended == "length"),
        }


async def tool_episode(
    client: Client,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    *,
    max_turns: int,
    on_call: OnCall = lambda *told: None,
) -> EndedEpisode:
    """Asks the model, answers its calls, those of one message at the same time, and asks again.

    ``on_call`` is told of each call of a tool that there is, when it has ended.
    """

    async def answer(call: ToolCall) -> tuple[str, bool]:
        start_s, is_error = time.monotonic(), True
        try:
            said, is_error = await tools.answer(call)
        finally:
            if call.name in tools:
                on_call(call.name, start_s, time.monotonic(), is_error)
        return said, is_error

    history = [dict(message) for message in messages]
    text, ended, num_calls, num_errors = "", "length", 0, 0
    num_turns = 0
    while num_turns < max_turns:
        try:
            reply = await client.chat(history, tools.schemas)
        except RequestFailed as error:
            if not error.is_context_end:
                raise
            break
        num_turns += 1
        history.append(reply.message)
        text, calls = reply.text, reply.tool_calls
        if reply.finish_reason == "length":
            break
        if not calls:
            ended = "stop"
            break
        num_calls += len(calls)
        if num_turns == max_turns:  # nobody would read the answers
            break
        answers = await asyncio.gather(*map(answer, calls))
        for call, (said, is_error) in zip(calls, answers, strict=True):
            history.append({"role": "tool", "tool_call_id": call.id, "content": said})
            num_errors += is_error
    return EndedEpisode(text, ended, num_turns, num_calls, num_errors)


def as_text(value: Any) -> str:
    """A tool's result, as the model reads it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
