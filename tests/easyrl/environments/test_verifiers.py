"""Environments of the ``verifiers`` library, unmodified, in a Python without ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from easyrl.config import EnvironmentConfig
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.schema import Prompt
from tests.easyrl.environments.environment_cases import prompt, rollout, running, written
from tests.easyrl.environments.installed import folder_with, python_with
from tests.easyrl.environments.scripted_chat import ScriptedChat, calls, refuses, says


def environment(folder: Path, module: str, **args: Any) -> EnvironmentConfig:
    python = python_with(folder_with("verifiers"), folder)
    return EnvironmentConfig(name="vf", verifiers=module, args=args, python=python)


def halves(body: dict[str, Any]) -> dict[str, Any]:
    """A player that halves what is left."""
    low, high, guess = 1, 20, 0
    for message in body["messages"]:
        if message["role"] == "assistant":
            guess = int(message["content"])
        elif message["content"] == "higher":
            low = guess + 1
        elif message["content"] == "lower":
            high = guess - 1
    return says(str((low + high) // 2))


async def test_several_turns_with_a_state(tmp_path: Path) -> None:
    async with ScriptedChat(halves) as chat:
        async with running(environment(tmp_path, "guessing", weight_of_speed=0.5)) as hosts:
            # 10, 5, 2, 3
            outcome = await rollout(hosts, chat, prompt("Guess.", answer="3"), session="a")
            assert outcome.reward == pytest.approx(1.0 + 0.5 / 4)
            assert outcome.components["found_it"] == 1.0
            assert outcome.components["speed"] == 0.25
            assert [chat.sessions.count("a"), chat.bodies[0]["messages"][0]["content"]] == [
                4,
                "Guess.",
            ]
            # a row of its own data: number 17 in 10, 15, 18, 16, 17
            row = prompt("(its own)", answer=None, metadata={"example_id": 1})
            own = await rollout(hosts, chat, row, session="b")
            assert own.components["speed"] == pytest.approx(0.2)
            assert chat.bodies[-1]["messages"][0]["content"].startswith("Guess my number")
            with pytest.raises(EnvironmentFailed, match="has example_id 9.* has 2 rows without it"):
                await rollout(hosts, chat, prompt(metadata={"example_id": 9}))


async def test_what_is_said_in_the_last_turn_counts(tmp_path: Path) -> None:
    """The library does not ask the environment behind it."""
    async with ScriptedChat(halves) as chat:
        async with running(environment(tmp_path, "guessing", max_turns=4)) as hosts:
            found = await rollout(hosts, chat, prompt(answer="3"))  # 10, 5, 2, 3
            missed = await rollout(hosts, chat, prompt(answer="4"))  # 10, 5, 2, 3
    assert len(chat.bodies) == 8
    assert [found.reward, missed.reward] == [1.0, 0.0]


async def test_its_turns_are_bounded_and_its_sampling_is_not_sent(tmp_path: Path) -> None:
    async with ScriptedChat(lambda _: says("20")) as chat:
        async with running(environment(tmp_path, "guessing", max_turns=3)) as hosts:
            outcome = await rollout(hosts, chat, prompt(answer="3"))
    assert outcome.components["found_it"] == 0.0
    assert len(chat.bodies) == 3
    assert not {"temperature", "top_p", "seed"} & set(chat.bodies[0])


async def test_tools(tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> dict[str, Any]:
        last = body["messages"][-1]
        if last["role"] == "tool":
            return says(last["content"])
        return calls(("calculate", json.dumps({"expression": "12*13"})))

    async with ScriptedChat(script) as chat:
        async with running(environment(tmp_path, "products")) as hosts:
            row = prompt(answer=None, metadata={"example_id": 0})
            outcome = await rollout(hosts, chat, row)
    assert outcome.reward == 1.0
    assert outcome.components["calculate_calls"] == 1.0
    (tool,) = chat.bodies[0]["tools"]
    assert tool["function"]["name"] == "calculate"
    assert list(tool["function"]["parameters"]["properties"]) == ["expression"]
    assert chat.bodies[0]["messages"] == [{"role": "user", "content": "12*13"}]


async def test_an_error_of_the_gateway_fails_the_rollout(tmp_path: Path) -> None:
    async with ScriptedChat(lambda _: refuses(400, "no such sampling")) as chat:
        async with running(environment(tmp_path, "guessing")) as hosts:
            with pytest.raises(EnvironmentFailed, match="no such sampling"):
                await rollout(hosts, chat, prompt(answer="3"))


async def test_the_end_of_the_context_is_an_end_and_its_rubric_judges(tmp_path: Path) -> None:
    full = "This model's maximum context length is 8 tokens, in which a prompt of 9 leaves no room"
    answers = iter([says("3"), refuses(400, full, "context_length_exceeded")])
    async with ScriptedChat(lambda _: next(answers)) as chat:
        async with running(environment(tmp_path, "guessing", weight_of_speed=0.5)) as hosts:
            outcome = await rollout(hosts, chat, prompt(answer="4"))
    assert outcome.components["found_it"] == 0.0
    assert outcome.reward == pytest.approx(0.5)  # for the one guess that it had room for


async def test_behind_the_last_turn_that_the_run_allows_its_rubric_judges(tmp_path: Path) -> None:
    refused = "max_turns_exceeded: an episode has at most 1 turns (max_turns of its environment)"
    answers = iter([says("3"), refuses(400, refused, "max_turns_exceeded")])
    async with ScriptedChat(lambda _: next(answers)) as chat:
        async with running(environment(tmp_path, "guessing", weight_of_speed=0.5)) as hosts:
            outcome = await rollout(hosts, chat, prompt(answer="4"))
    assert outcome.reward == pytest.approx(0.5)  # for the one guess that it was allowed


async def test_an_environment_that_is_not_there(tmp_path: Path) -> None:
    hosts = EnvironmentHosts(environment(tmp_path, "nothing_of_that_name"))
    try:
        with pytest.raises(EnvironmentFailed, match="nothing_of_that_name"):
            await hosts.start()
    finally:
        await hosts.close()


GROUPED = """
    import verifiers as vf
    from datasets import Dataset

    def right(completion, answer) -> float:
        return 1.0

    def spread(completions, **kwargs) -> list[float]:
        return [0.0 for _ in completions]

    def ranked(states) -> list[float]:
        return [0.0 for _ in states]

    def single(*functions):
        rows = Dataset.from_list([{"question": "1 + 1", "answer": "2"}])
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=list(functions)))

    def load_environment(kind):
        if kind == "rubric":
            return single(right, spread)
        environment = single(right)
        if kind == "rubric group":
            rubrics = [vf.Rubric(funcs=[right]), vf.Rubric(funcs=[ranked])]
            environment.rubric = vf.RubricGroup(rubrics)
        if kind == "environment group":
            return vf.EnvGroup([environment, single(ranked)])
        return environment
"""


@pytest.mark.parametrize(
    ("kind", "name"),
    [("rubric", "spread"), ("rubric group", "ranked"), ("environment group", "ranked")],
)
async def test_rewards_of_a_whole_group_are_refused_at_the_start(
    tmp_path: Path, kind: str, name: str
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    written(folder, GROUPED, "grouped.py")
    python = python_with(folder_with("verifiers"), tmp_path, folder)
    config = EnvironmentConfig(name="vf", verifiers="grouped", args={"kind": kind}, python=python)
    said = await failure(config)
    assert said.startswith("environment vf: ")
    assert f"reward {name} of grouped is given all rollouts" in said
    single = config.model_copy(update={"args": {"kind": "one by one"}})
    async with running(single):
        pass


# -- without the library


LIBRARY = """
    class Environment:
        def get_dataset(self):
            return [{"example_id": 4, "worth": 1.0}]

        def get_eval_dataset(self):
            return [{"example_id": 4, "worth": 2.0}, {"worth": 3.0}]

        async def run_rollout(self, input, client, model, sampling_args):
            return {"reward": input["worth"]}

    def load_environment(name):
        return Environment()
"""
OPENAI = """
    class Timeout:
        def __init__(self, *arguments, **keys): ...

    class AsyncOpenAI(Timeout):
        def with_options(self, **keys):
            return self
"""


async def test_held_out_records_are_rows_of_the_data_for_evaluation(tmp_path: Path) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    written(libraries, LIBRARY, "verifiers.py")
    written(libraries, OPENAI, "openai.py")
    config = EnvironmentConfig(name="vf", verifiers="any", python=python_with(libraries, tmp_path))

    def row(number: int, is_held_out: bool) -> Prompt:
        return prompt(metadata={"example_id": number}, is_held_out=is_held_out)

    async with ScriptedChat() as chat, running(config) as hosts:
        for number, is_held_out, worth in ((4, True, 2.0), (4, False, 1.0), (1, True, 3.0)):
            assert (await rollout(hosts, chat, row(number, is_held_out))).reward == worth
        with pytest.raises(EnvironmentFailed, match="example_id 1, .* data has 1 rows without it"):
            await rollout(hosts, chat, row(1, is_held_out=False))
        with pytest.raises(EnvironmentFailed, match="held-out data has 2 rows without it"):
            await rollout(hosts, chat, row(9, is_held_out=True))


async def failure(config: EnvironmentConfig) -> str:
    hosts = EnvironmentHosts(config)
    try:
        with pytest.raises(EnvironmentFailed) as raised:
            await hosts.start()
    finally:
        await hosts.close()
    return str(raised.value)


async def test_what_is_missing_or_of_another_version_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    python = python_with(empty, tmp_path)
    config = EnvironmentConfig(name="vf", verifiers="guessing", python=python)
    assert f"verifiers is not installed in {sys.executable}" in await failure(config)
    written(empty, '__version__ = "0.4.0"', "verifiers.py")
    said = await failure(config)
    assert "verifiers 0.4.0" in said and "install verifiers>=0.1.10,<0.4 there" in said
    old = """
        class Environment:
            def run_rollout(self, client, model, prompt): ...

        def load_environment(name):
            return Environment()
    """
    written(empty, old, "verifiers.py")
    assert "takes no 'input'" in await failure(config)
