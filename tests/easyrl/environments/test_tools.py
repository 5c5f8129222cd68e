"""Tools of typed functions, their schemas, and the loop in which a model calls them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from easyrl.config import EnvironmentConfig, RewardConfig, ToolsConfig
from easyrl.environments.call_threads import num_hung
from easyrl.environments.client import Connections, ToolCall
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.environments.tool_schema import BadArguments, FunctionSchema, docstring_parts
from easyrl.environments.tools import EndedEpisode, FunctionTool, Tools, tool_episode
from tests.easyrl.environments.environment_cases import prompt, rollout, running, written
from tests.easyrl.environments.scripted_chat import ScriptedChat, calls, refuses, says
from tests.waiting import until


class Place(BaseModel):
    """Where something is."""

    title: str
    floor: int = 0


def look_up(
    query: str,
    where: Place,
    kind: Literal["word", "number"] = "word",
    limit: Annotated[int, Field(ge=1, description="at most so many")] = 3,
    copy: bool = False,
) -> list[str]:
    """Finds things.

    In all that there is.

    Args:
        query: what to look for,
            in any language
        where (Place): the place
        copy: whether to copy it

    Returns:
        names: of what was found
    """
    return [query, where.title, kind, str(limit), str(copy)]


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


def stuck(seconds: float) -> str:
    """Waits, and nobody can end it."""
    time.sleep(seconds)
    return "done"


def broken(kind: str = "error") -> str:
    """Fails."""
    if kind == "exit":
        raise SystemExit(2)
    if kind == "stop":
        raise StopIteration
    raise OSError("no disk")


def tool_set(timeout_s: float = 5.0) -> Tools:
    return Tools([FunctionTool(f, timeout_s) for f in (look_up, add, slow, stuck, broken)])


def test_the_schema_of_a_function() -> None:
    schema = FunctionSchema(look_up)
    assert schema.name == "look_up"
    assert schema.description == "Finds things.\n\nIn all that there is."
    assert schema.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["query", "where"],
        "properties": {
            "query": {"type": "string", "description": "what to look for, in any language"},
            "where": {"$ref": "#/$defs/Place", "description": "the place"},
            "kind": {"type": "string", "enum": ["word", "number"], "default": "word"},
            "limit": {
                "type": "integer",
                "minimum": 1,
                "default": 3,
                "description": "at most so many",
            },
            "copy": {"type": "boolean", "default": False, "description": "whether to copy it"},
        },
        "$defs": {
            "Place": {
                "type": "object",
                "description": "Where something is.",
                "required": ["title"],
                "properties": {
                    "title": {"type": "string"},
                    "floor": {"type": "integer", "default": 0},
                },
            }
        },
    }


def test_arguments_become_what_the_function_takes() -> None:
    given = FunctionSchema(look_up).arguments(
        '{"query": "x", "where": {"title": "home"}, "copy": true}'
    )
    assert given == {"query": "x", "where": Place(title="home"), "copy": True}
    assert look_up(**given) == ["x", "home", "word", "3", "True"]


@pytest.mark.parametrize(
    ("written", "says_so"),
    [
        ('{"a": 1', "they are no JSON"),
        ("[1, 2]", "they have to be a JSON object"),
        ('{"a": 1}', "b: Field required"),
        ('{"a": 1, "b": "two"}', "b: Input should be a valid integer"),
        ('{"a": 1, "b": 2, "c": 3}', "c: Extra inputs are not permitted"),
        ("[" * 100_000, "they are no JSON"),
    ],
)
def test_arguments_that_do_not_fit(written: str, says_so: str) -> None:
    with pytest.raises(BadArguments, match=f"^invalid arguments: .*{says_so}"):
        FunctionSchema(add).arguments(written)


def no_annotation(x):  # type: ignore[no-untyped-def]
    """Has none."""


def no_docstring(x: int) -> None: ...


def any_number(*x: int) -> None:
    """Takes any number."""


def no_schema(x: asyncio.Event) -> None:
    """Takes what JSON has not."""


@pytest.mark.parametrize(
    ("function", "says_so"),
    [
        (no_annotation, "here: x of tool no_annotation has no annotation; give it a type"),
        (no_docstring, "has no docstring"),
        (any_number, "name its arguments"),
        (no_schema, "has no JSON schema"),
    ],
)
def test_a_function_that_cannot_be_a_tool(function: Any, says_so: str) -> None:
    with pytest.raises(ValueError, match=says_so):
        FunctionSchema(function, "here")


def test_a_docstring_without_arguments() -> None:
    assert docstring_parts("One line.") == ("One line.", {})


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "is_error"),
    [
        ("add", '{"a": 2, "b": 3}', "5", False),
        ("look_up", '{"query": "ü", "where": {"title": "t"}}', '["ü", "t", "word"', False),
        ("add", '{"a": 2}', "error: invalid arguments: b: Field required", True),
        ("nothing", "{}", "error: there is no tool 'nothing'; use look_up, add, slow", True),
        ("broken", "", "error: OSError: no disk", True),
        ("broken", '{"kind": "exit"}', "error: RuntimeError: SystemExit: 2", True),
        ("broken", '{"kind": "stop"}', "error: RuntimeError: StopIteration", True),
        ("slow", '{"seconds": 60}', "error: slow took longer than 0.2 s", True),
        ("stuck", '{"seconds": 1}', "error: stuck took longer than 0.2 s", True),
    ],
)
async def test_what_a_call_is_answered(
    name: str, arguments: str, answer: str, is_error: bool
) -> None:
    said, failed = await tool_set(0.2).answer(ToolCall("id", name, arguments))
    assert said.startswith(answer) and failed == is_error


async def test_functions_that_hang_do_not_stand_in_the_way_of_others() -> None:
    before, may_end = num_hung(), threading.Event()

    def hold() -> str:
        """Waits until it may end."""
        return str(may_end.wait(60.0))

    tools = Tools([FunctionTool(hold, timeout_s=1.0), FunctionTool(add, timeout_s=10.0)])
    asked = asyncio.gather(*(tools.answer(ToolCall("id", "hold", "{}")) for _ in range(40)))
    await asyncio.sleep(0.1)
    assert await tools.answer(ToolCall("id", "add", '{"a": 2, "b": 3}')) == ("5", False)
    assert {failed for _, failed in await asked} == {True}
    assert num_hung() >= before + 40 - 1  # one of an earlier test may have ended
    assert await at_a_time(100) == [("met", False)] * 100  # many at a time are none stuck
    may_end.set()
    await until(lambda: num_hung() == 0)


async def at_a_time(num_calls: int) -> list[tuple[str, bool]]:
    """The answers of calls none of which returns before all have begun."""
    begun = threading.Barrier(num_calls)

    def meet() -> str:
        """Waits for the others."""
        begun.wait(60.0)
        return "met"

    tools = Tools([FunctionTool(meet, timeout_s=60.0)])
    asked = [tools.answer(ToolCall("id", "meet", "{}")) for _ in range(num_calls)]
    return await asyncio.gather(*asked)


def half(kind: str) -> Any:
    """Says half of a surrogate pair, as a file's name may have it."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    if kind == "error":
        raise OSError(name)
    return name if kind == "text" else {name: name}


async def test_half_a_surrogate_pair_of_a_tool_is_a_question_mark() -> None:
    asked = [("half", json.dumps({"kind": kind})) for kind in ("text", "json", "error")]
    answers = iter([calls(*asked), says("done")])
    connections = Connections()
    async with ScriptedChat(lambda _: next(answers)) as chat:
        client = connections.client(chat.session("s"), chat.key)
        tools, question = Tools([FunctionTool(half, 5.0)]), {"role": "user", "content": "?"}
        try:
            ended = await tool_episode(client, [question], tools, max_turns=2)
        finally:
            await connections.close()
    assert ended == EndedEpisode("done", "stop", num_turns=2, num_calls=3, num_errors=1)
    said = [m["content"] for m in chat.bodies[-1]["messages"] if m["role"] == "tool"]
    assert said == ["caf?", '{"caf?": "caf?"}', "error: OSError: caf?"]


async def episode(chat: ScriptedChat, max_turns: int = 4) -> EndedEpisode:
    connections = Connections()
    try:
        client = connections.client(chat.session("s"), chat.key)
        messages = [{"role": "user", "content": "2 + 3?"}]
        return await tool_episode(client, messages, tool_set(), max_turns=max_turns)
    finally:
        await connections.close()


async def test_the_model_calls_tools_until_it_answers() -> None:
    turns = iter(
        [
            calls(("add", '{"a": 2, "b": 3}'), ("slow", '{"seconds": 0.01}')),
            calls(("broken", "{}")),
            says("5"),
        ]
    )
    async with ScriptedChat(lambda _: next(turns)) as chat:
        ended = await episode(chat)
    assert ended == EndedEpisode("5", "stop", num_turns=3, num_calls=3, num_errors=1)
    assert [tool["function"]["name"] for tool in chat.bodies[0]["tools"]][:2] == ["look_up", "add"]
    last = chat.bodies[-1]["messages"]
    assert [message["role"] for message in last] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]
    assert [m["content"] for m in last if m["role"] == "tool"] == [
        "5",
        "done",
        "error: OSError: no disk",
    ]
    assert [m["tool_call_id"] for m in last if m["role"] == "tool"][:2] == ["call-0", "call-1"]


async def test_the_last_turn_ends_it_and_its_calls_are_not_run() -> None:
    async with ScriptedChat(lambda _: calls(("broken", "{}"))) as chat:
        ended = await episode(chat, max_turns=2)
    assert ended == EndedEpisode("", "length", num_turns=2, num_calls=2, num_errors=1)
    assert len(chat.bodies) == 2


async def test_a_message_that_is_cut_off_ends_it() -> None:
    async with ScriptedChat(lambda _: says("5 is", finish_reason="length")) as chat:
        assert await episode(chat) == EndedEpisode("5 is", "length", 1, 0, 0)


async def test_the_end_of_the_context_ends_it() -> None:
    answers = iter(
        [calls(("add", '{"a": 2, "b": 3}')), refuses(400, "too long", "context_length_exceeded")]
    )
    async with ScriptedChat(lambda _: next(answers)) as chat:
        assert await episode(chat) == EndedEpisode("", "length", 1, 1, 0)


# -- as an environment


TOOLS = '''
    import math

    def root(x: float) -> float:
        """The square root of a number."""
        return math.sqrt(x)

    def _hidden(x: int) -> int:
        return x
'''


def environment(folder: Path, **keys: Any) -> EnvironmentConfig:
    tools = ToolsConfig(file=written(folder, TOOLS, "tools.py"), **keys.pop("of_tools", {}))
    rewards = keys.pop("rewards", [RewardConfig(name="exact")])
    return EnvironmentConfig(name="calc", tools=[tools], rewards=rewards, **keys)


def answers_with_root(body: dict[str, Any]) -> Any:
    if body["messages"][-1]["role"] == "user":
        return calls(("root", '{"x": 16}'))
    return says(f"It is</think>{float(body['messages'][-1]['content']):.0f}")


async def test_a_tool_environment_and_its_rewards(tmp_path: Path) -> None:
    source = """
        def reward_func(prompt, texts, token_ids):
            return [{"score": len(texts[0]), "index": prompt.index}]
    """
    own = RewardConfig(file=written(tmp_path, source, "reward.py"), weight=0.01, log_as="chars")
    rewards = [RewardConfig(name="exact", weight=2.0), own]
    async with ScriptedChat(answers_with_root) as chat:
        async with running(environment(tmp_path, rewards=rewards)) as hosts:
            outcome = await rollout(hosts, chat, prompt("root of 16?", 3, answer="4"))
    assert outcome.reward == pytest.approx(2.0 + 0.14)
    assert outcome.components == {
        "exact": 1.0,
        "chars": 14.0,
        "chars/index": 3.0,
        "turns": 2.0,
        "tool_calls": 1.0,
        "tool_errors": 0.0,
        "length": 0.0,
    }
    assert [tool["function"]["name"] for tool in chat.bodies[0]["tools"]] == ["root"]


SLOW_TOOLS = '''
    import time

    def nap(seconds: float) -> str:
        """Sleeps."""
        if seconds < 0:
            raise ValueError("no")
        time.sleep(seconds)
        return "done"
'''


async def test_a_host_says_what_each_call_of_a_tool_took(tmp_path: Path) -> None:
    asked = [("nap", '{"seconds": 0.2}'), ("nap", '{"seconds": -1}'), ("unknown", "{}")]
    answers = iter([calls(*asked), says("4")])
    config = environment(tmp_path)
    written(tmp_path, SLOW_TOOLS, "tools.py")
    before_s = time.monotonic()
    async with ScriptedChat(lambda _: next(answers)) as chat, running(config) as hosts:
        outcome = await rollout(hosts, chat, prompt(answer="4"))
    failed, slept = sorted(outcome.tool_calls, key=lambda call: call.end_s - call.start_s)
    assert (slept.name, slept.is_error, failed.name, failed.is_error) == ("nap", False, "nap", True)
    assert 0.2 <= slept.end_s - slept.start_s < 2.0  # a sleep, on a busy machine
    assert failed.end_s - failed.start_s < 0.2
    assert before_s < slept.start_s < slept.end_s < time.monotonic()  # by the same clock
    assert outcome.components["tool_errors"] == 2.0  # the unknown one took nothing


@pytest.mark.parametrize(
    ("source", "keys", "says_so"),
    [
        ("x = 1", {}, "tools.py defines no public function"),
        (TOOLS, {"functions": ["cube"]}, "defines no 'cube'; its functions: root"),
        ("def f(x): ...", {}, "tools.py:1: tool f has no docstring"),
        ("1 / 0", {}, "tools.py:1: ZeroDivisionError|ZeroDivisionError"),
    ],
)
async def test_tools_that_cannot_be_used_are_said_at_the_start(
    source: str, keys: dict[str, Any], says_so: str, tmp_path: Path
) -> None:
    config = environment(tmp_path, of_tools=keys)
    written(tmp_path, source, "tools.py")
    hosts = EnvironmentHosts(config)
    try:
        with pytest.raises(EnvironmentFailed, match=says_so):
            await hosts.start()
    finally:
        await hosts.close()


async def test_a_record_without_an_answer_fails_its_rollout(tmp_path: Path) -> None:
    async with ScriptedChat(answers_with_root) as chat:
        async with running(environment(tmp_path)) as hosts:
            with pytest.raises(EnvironmentFailed, match="prompt 0 has no answer"):
                await rollout(hosts, chat, prompt(answer=None))


def test_schemas_are_json(tmp_path: Path) -> None:
    assert json.loads(json.dumps(tool_set().schemas))[1]["function"]["name"] == "add"
