"""``examples/calculator_tool`` and ``examples/text_game``, each as its configuration has it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easyrl.config import Config, DatasetConfig
from easyrl.config.file import load_config
from easyrl.schema import Prompt
from tests.dataloaders.test_prompts import DATA, needs_data
from tests.easyrl.environments.environment_cases import rollout, running
from tests.easyrl.environments.scripted_chat import ScriptedChat, calls, says

ROOT = Path(__file__).parents[3]


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(ROOT)
    return load_config(Path(f"examples/{name}/config.yaml"))


def prompts(data: DatasetConfig) -> list[Prompt]:
    """As the trainer reads them, without a tokenizer."""
    found = []
    for line in data.files[0].read_text().splitlines():
        record = json.loads(line)
        text = record.pop(data.fields.prompt)
        answer = record.pop(data.fields.answer) if data.fields.answer else None
        if data.answer_pattern:
            match = re.search(data.answer_pattern, answer)
            assert match
            answer = match[1]
        found.append(Prompt(len(found), np.zeros(1, np.int32), text, answer, metadata=record))
    return found


async def test_the_calculator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that calculates what the record's own solution does, and one that guesses."""
    config = example("calculator_tool", monkeypatch)
    records = [json.loads(line) for line in config.data.files[0].read_text().splitlines()]
    solutions = {record["question"]: record["answer"] for record in records}

    def solver(body: dict[str, Any]) -> dict[str, Any]:
        user = next(m["content"] for m in body["messages"] if m["role"] == "user")
        steps = re.findall(r"[\d.]+(?: [-+*/] [\d.]+)+(?= =)", solutions[user])
        answers = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        if len(answers) < len(steps):
            arguments = json.dumps({"expression": steps[len(answers)]})
            return calls(("calculate", arguments))
        last = answers[-1]
        return says(f"So it is\n#### {'12' if last == '11.5' else last}")

    (environment,) = config.environments
    asked = prompts(config.data)
    async with ScriptedChat(solver) as chat, running(environment) as hosts:
        solved = [await rollout(hosts, chat, prompt) for prompt in asked]
        chat.script = lambda body: says("#### 1")
        guessed = [await rollout(hosts, chat, prompt) for prompt in asked]
    assert len(asked) == 12
    # a solution's last step is not always its last sum; most are
    assert np.mean([outcome.reward for outcome in solved]) >= 0.75
    assert all(outcome.components["tool_errors"] == 0 for outcome in solved)
    assert all(outcome.components["tool_calls"] >= 1 for outcome in solved)
    assert [outcome.reward for outcome in guessed] == [0.0] * 12
    (tool,) = chat.bodies[0]["tools"]
    described = tool["function"]["parameters"]["properties"]["expression"]
    assert described["description"].startswith("numbers with + - * /")


@needs_data
async def test_the_calculator_on_gsm8k(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what the records' own annotations say, ``<<48/2=24>>``, and their answers count."""
    config = example("calculator_tool", monkeypatch)
    file = DATA / "gsm8k_train.jsonl"
    asked = prompts(config.data.model_copy(update={"files": [file]}))
    assert len(asked) == 7473 and all(prompt.answer for prompt in asked)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    sums = {
        record["question"]: re.findall(r"<<([^=<>]+)=([^=<>]+)>>", record["answer"])
        for record in records
    }
    answers = {prompt.text: prompt.answer for prompt in asked}
    is_equal: list[bool] = []

    def solver(body: dict[str, Any]) -> dict[str, Any]:
        user = next(m["content"] for m in body["messages"] if m["role"] == "user")
        told = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        if not told and sums[user]:
            return calls(
                *(("calculate", json.dumps({"expression": each})) for each, _ in sums[user])
            )
        for (_, expected), value in zip(sums[user], told, strict=True):
            is_equal.append(abs(float(value) - float(expected.replace(",", ""))) < 0.01)
        return says(f"So it is\n#### {answers[user]}")

    chosen = asked[::100]
    async with ScriptedChat(solver) as chat, running(config.environments[0]) as hosts:
        outcomes = [await rollout(hosts, chat, prompt) for prompt in chosen]
    assert [outcome.reward for outcome in outcomes] == [1.0] * 75
    assert sum(outcome.components["tool_calls"] for outcome in outcomes) == len(is_equal) > 200
    assert np.mean(is_equal) > 0.98  # some annotations are rounded


async def test_the_calculator_is_told_of_what_is_no_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = example("calculator_tool", monkeypatch)
    hostile = ["__import__('os').getpid()", "9 ** 9 ** 9", "1 / 0", "(" * 150, "x", "1" * 199]
    turns = iter([calls(*(("calculate", json.dumps({"expression": e})) for e in hostile))])

    def script(body: dict[str, Any]) -> dict[str, Any]:
        return next(turns, says("#### 49"))

    async with ScriptedChat(script) as chat, running(config.environments[0]) as hosts:
        outcome = await rollout(hosts, chat, prompts(config.data)[0])
    assert outcome.reward == 1.0
    assert outcome.components["tool_errors"] == len(hostile)


async def test_the_text_game(monkeypatch: pytest.MonkeyPatch) -> None:
    """A player that goes along the rooms wins all games; one that waits wins none."""
    config = example("text_game", monkeypatch)

    def player(body: dict[str, Any]) -> dict[str, Any]:
        seen = body["messages"][-1]["content"]
        said = [m["content"] for m in body["messages"]]
        has_key = any("You have the key" in text for text in said)
        if "A key hangs" in seen:
            return says("take")
        if "locked door" in seen and has_key:
            return says("I try it: open.")
        turned = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
        way = next((c for c in reversed(turned) if c in ("left", "right")), "left")
        if way not in seen.rpartition("You can go")[2]:
            way = "right" if way == "left" else "left"
        return says(way)

    (environment,) = config.environments
    asked = prompts(config.data)
    async with ScriptedChat(player) as chat, running(environment) as hosts:
        won = [await rollout(hosts, chat, prompt) for prompt in asked]
        chat.script = lambda body: says("I wait")
        lost = [await rollout(hosts, chat, prompt) for prompt in asked]
    assert len(asked) == 8
    for outcome in won:
        assert outcome.components["key"] == 1.0
        assert outcome.reward == pytest.approx(sum(outcome.turn_rewards))
        assert len(outcome.turn_rewards) == outcome.components["turns"] <= 12
    assert np.mean([outcome.components["won"] for outcome in won]) >= 0.75
    assert won[0].turn_rewards == pytest.approx((0, 0, 0.3, 0, 0.7), abs=0) or won[0].reward == 1.0
    assert {(outcome.reward, outcome.components["turns"]) for outcome in lost} == {(0.0, 12.0)}
