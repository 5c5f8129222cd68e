"""The files of ``docs/own_environment.md``: each configuration loads, and its environment plays."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from easyrl.config import Config, EnvironmentConfig
from easyrl.config.file import load_config
from easyrl.metrics.trackers import read_metrics
from tests.easyrl.environments.environment_cases import prompt, rollout, running
from tests.easyrl.environments.installed import folder_with, python_with
from tests.easyrl.environments.scripted_chat import ScriptedChat, calls, says
from tests.end_to_end.trainer_run import ROOT, run_to_end, run_trainer
from tests.packaging.doc_references import BLOCK

PAGE = (ROOT / "docs/own_environment.md").read_text()
RECORDS = re.compile(r"`([\w.]+\.jsonl)`:\n\n```json\n(.*?)```", re.DOTALL)
CONFIGS = ["guess.yaml", "shop.yaml", "products.yaml", "openenv.yaml"]
RECORD = '{"prompt": "Well?", "answer": "7"}\n'  # where the page shows none


def files() -> dict[str, str]:
    """By the name in the first line, or before the records."""
    named = {
        block.split("\n", 1)[0].removeprefix("# "): block
        for language, block in BLOCK.findall(PAGE)
        if language in ("python", "yaml")
    }
    return named | dict(RECORDS.findall(PAGE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a reader who has done as the page says."""
    for name in ("products.jsonl", "openenv.jsonl"):
        (tmp_path / name).write_text(RECORD)
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    interpreter = tmp_path / "envs/verifiers/bin/python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTES_KEY", "MARKED")
    return tmp_path


def only_environment(config: Config) -> EnvironmentConfig:
    (environment,) = config.environments
    return environment


def test_each_configuration_loads_and_each_file_is_used(folder: Path) -> None:
    assert sorted(name for name in files() if name.endswith(".yaml")) == sorted(CONFIGS)
    loaded = {name: load_config(folder / name) for name in CONFIGS}
    kinds = [only_environment(config).kind for config in loaded.values()]
    assert kinds == ["coroutine", "tools", "verifiers", "openenv"]
    texts = "".join(text for name, text in files().items() if name.endswith(".yaml"))
    assert [n for n in files() if not n.endswith(".yaml") and n not in texts] == []
    for config in loaded.values():
        for file in config.data.files:
            assert all("prompt" in json.loads(line) for line in file.read_text().splitlines())


async def test_the_coroutine_guesses(folder: Path) -> None:
    def halves(body: Mapping[str, Any]) -> dict[str, Any]:
        hints = [m["content"] for m in body["messages"][1:] if m["role"] == "user"]
        low, high = 1, 9
        for hint in hints:
            guess = (low + high) // 2
            low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
        return says(f"I say {(low + high) // 2}.")

    environment = only_environment(load_config(folder / "guess.yaml"))
    async with ScriptedChat(halves) as chat, running(environment) as hosts:
        outcome = await rollout(hosts, chat, prompt("Guess.", answer="7"))
        other = await rollout(hosts, chat, prompt("Guess.", answer="12"))
    assert outcome.turn_rewards == (0.0, 1.0) and outcome.reward == pytest.approx(0.8)
    assert outcome.components == {"found": 1.0}
    assert other.turn_rewards == (0.0,) * 4 and other.reward == pytest.approx(-0.4)


async def test_the_tools_are_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its MCP server, by ``make test-verifiers``."""
    library = folder_with("mcp")
    python = python_with(library, folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    config = load_config(
        folder / "shop.yaml",
        [f"environments[0].tools[1].command=[{python},{folder / 'notes_server.py'}]"],
    )
    melon = '{"fruit": "melon"}'
    turns = iter([calls(("price", melon), ("discount", melon), ("price", '{"fruit": "kiwi"}'))])

    def script(body: Mapping[str, Any]) -> dict[str, Any]:
        return next(turns) if body["messages"][-1]["role"] == "user" else says("#### 7")

    async with ScriptedChat(script) as chat, running(only_environment(config)) as hosts:
        outcome = await rollout(hosts, chat, prompt("?", answer="7"))
    assert outcome.reward == 1.0
    told = [m["content"] for m in chat.bodies[-1]["messages"] if m["role"] == "tool"]
    assert told == ["14", "50", "error: KeyError: 'kiwi'"]


@pytest.mark.runs
def test_the_coroutine_is_a_run(served: Any, folder: Path) -> None:
    """The page's command, with another model and server."""
    command = [sys.executable, "-m", "easyrl.train", str(folder / "guess.yaml")]
    command += [f"model.path={served.model}", f"inference.endpoints=[{served.url}]"]
    command += ["model.dtype=fp32", "trainer.zero_stage=0", "run.trackers=[]"]
    command += [f"data.files=[{folder / 'numbers.jsonl'}]", f"run.output_dir={folder / 'run'}"]
    command += [f"environments[0].file={folder / 'guess.py'}"]
    run_trainer(command)
    (step,) = [m for m in read_metrics(folder / "run/metrics.jsonl") if m["step"] > 0]
    assert step["environment/guess/episodes"] == 2 * 4
    assert step["environment/guess/turns"] >= 1 and step["environment/guess/failures"] == 0
    assert "reward/guess/found/mean" in step
    verified = run_to_end([sys.executable, "-m", "easyrl", "verify", str(folder / "run")])
    assert verified.returncode == 0 and "8 episodes of" in verified.stdout, verified.stdout
